"""Writes everything the demo needs: four tenants' data sets, a tokenizer and a small base model. No network.

    python infra/demo/make_assets.py OUT_DIR

    OUT_DIR/data/{arithmetic,support,code,meetings}.jsonl    short, chats, medium, long tail
    OUT_DIR/base/                                            tokenizer and Llama-style model in Hugging Face form

Every byte follows from SEED; a stamp skips finished work.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from tenant_texts import TENANTS


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for tenant in TENANTS:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in tenant.rows("train")]
        (folder / f"{tenant.name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main(out_dir: Path) -> None:
    stamp = out_dir / ".stamp"
    sources = sorted(Path(__file__).parent.glob("*.py"))
    fingerprint = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if stamp.exists() and stamp.read_text() == fingerprint:
        print(f"demo assets: {out_dir} is up to date")
        return
    from base_model import write_base  # here, because torch takes seconds to import

    started = time.perf_counter()
    stamp.unlink(missing_ok=True)
    write_data(out_dir / "data")
    loss = write_base(out_dir / "base")
    stamp.write_text(fingerprint)
    print(f"demo assets: {out_dir} written in {time.perf_counter() - started:.0f} s, base model's loss {loss:.2f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python infra/demo/make_assets.py OUT_DIR")
    main(Path(sys.argv[1]))
