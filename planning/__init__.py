"""Numbers in, plans out: deployment plans and per-step dispatch. No torch, no Prefect, no files but profiles."""
