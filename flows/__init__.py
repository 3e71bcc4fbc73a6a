"""Prefect flows, their parameters and the command line."""
