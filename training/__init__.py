"""Joint training of many adapters on a fleet of unequal Megatron replicas. Importing the package loads no torch."""
