"""Prefect tasks: each reads, calls one function of the lower folders and writes."""
