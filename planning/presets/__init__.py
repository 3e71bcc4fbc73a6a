"""Profiles that ship with the product, one JSON file each; `planning.profile.read_preset` reads them."""
