"""What the Prefect run page shows of a result, beside its tables."""

import base64
from pathlib import Path


def figure_markdown(path: Path, name: str) -> str:
    """A PNG file within Markdown: the run page has no way to the run folder, and an image artifact would print its
    whole data URI below the picture."""
    return f"![{name}](data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')})"
