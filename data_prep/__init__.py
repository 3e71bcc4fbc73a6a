"""From tenants' files to token files, length histograms, sampled sequences and collated chunks."""
