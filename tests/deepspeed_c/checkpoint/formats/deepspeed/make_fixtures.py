"""Makes the checkpoints in fixtures/ with an installed DeepSpeed. Run it with this project's Python, from the root of
the repository.

    python -m tests.deepspeed_c.checkpoint.formats.deepspeed.make_fixtures PYTHON_WITH_DEEPSPEED

Each fixture is an archive of the folder that DeepSpeed wrote, without the script zero_to_fp32.py, and of the report of
peer.py. The report has every tensor, as DeepSpeed's own accessors show it. Existing fixtures of the same DeepSpeed
version are replaced.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.deepspeed_c.checkpoint.formats.deepspeed.harness import MORE_STEPS, STEPS, config, run_peer

FIXTURES = Path(__file__).with_name("fixtures")

# The cases for every version: name -> (stage, dtype, world size, more keys of the spec).
CASES: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "stage0-fp16": (0, "fp16", 1, {}), "stage1-bf16": (1, "bf16", 2, {}), "stage2-fp16": (2, "fp16", 2, {}),
    "stage3-bf16": (3, "bf16", 2, {}),
}  # fmt: skip
# The cases for the newest version alone.
NEWEST = "0.19"
MORE_CASES: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "stage0-fp32": (0, "fp32", 1, {}),
    "stage0-fp16-fused": (0, "fp16", 1, {"optimizer": "fused"}),
    "stage0-bf16-sgd": (0, "bf16", 1, {"optimizer": "sgd"}),
    "stage1-bf16-fp32-accumulation": (1, "bf16", 2, {"more": {"data_types": {"grad_accum_dtype": "fp32"}}}),
    "stage1-fp32-elastic": (1, "fp32", 2, {"zero": {"elastic_checkpoint": True}}),
    "stage2-bf16-round-robin": (2, "bf16", 3, {"zero": {"round_robin_gradients": True}}),
    "stage2-bf16-old-format": (2, "bf16", 1, {"more": {"checkpoint": {"checkpoint_serialization": False}}}),
    "stage3-fp32": (3, "fp32", 2, {}),
}
UNIVERSAL = {"stage1-bf16", "stage3-bf16"}

CONVERT = """
import argparse, sys
from deepspeed.checkpoint.ds_to_universal import main
main(argparse.Namespace(input_folder=sys.argv[1], output_folder=sys.argv[2], num_extract_workers=1, num_merge_workers=1,
                        keep_temp_folder=False, strict=True, inject_missing_state=True))
"""


def convert(python: str, folder: Path, output: Path) -> None:
    """Converts the folder of a tag to the universal format, by DeepSpeed's own converter."""
    subprocess.run([python, "-c", CONVERT, str(folder), str(output)], check=True, capture_output=True, timeout=300)


def make(python: str, name: str, stage: int, dtype: str, world_size: int, more: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        spec = {
            "config": config(stage, dtype, zero=more.get("zero", {}), **more.get("more", {})),
            "optimizer": more.get("optimizer", "adamw"), "steps": STEPS, "save": str(folder / "saved"), "tag": "t3",
            "client_state": {"epoch": 3, "note": "fixture"}, "more_steps": MORE_STEPS,
        }  # fmt: skip
        report = run_peer(python, spec, folder / "run", world_size)
        (folder / "saved" / "zero_to_fp32.py").unlink(missing_ok=True)
        version = report["version"].split("+")[0]
        pack(folder / "saved", folder / "run" / "report_0.pt", f"{version}-{name}")
        if name in UNIVERSAL and version.startswith(NEWEST):
            universal = folder / "universal"
            universal.mkdir()
            convert(python, folder / "saved" / "t3", universal / "t3")
            pack(universal, folder / "run" / "report_0.pt", f"{version}-universal-{name}")


def pack(folder: Path, report: Path, name: str) -> None:
    FIXTURES.mkdir(exist_ok=True)
    path = FIXTURES / f"{name}.tar.xz"
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for file in [*sorted(folder.rglob("*")), report]:
            if file.is_file():
                inside = "report.pt" if file == report else f"checkpoint/{file.relative_to(folder)}"
                info = tarfile.TarInfo(inside)
                info.size = file.stat().st_size
                with open(file, "rb") as content:
                    archive.addfile(info, content)
    print(f"{name}: {path.stat().st_size} bytes", flush=True)


def main() -> None:
    python = sys.argv[1]
    ask = "import deepspeed; print(deepspeed.__version__)"
    version = subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True, timeout=300
    ).stdout.split()[-1]
    cases = {**CASES, **(MORE_CASES if version.startswith(NEWEST) else {})}
    for name in sys.argv[2:] or cases:
        make(python, name, *cases[name])


if __name__ == "__main__":
    main()
