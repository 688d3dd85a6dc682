"""How long does the analysis of a data set take in 2 processes, against DeepSpeed's ``DataAnalyzer``?

Both compute one metric with a value for each sample: the number of tokens that are not 0 in rows of 16. A run is the map and
the reduction, in a new process; its start and its imports are not counted. The sides take turns. Both have to write the same
values, and the same samples for each value. "the map alone of plain torch" is the bound: a loop over the same batches that
computes the metric, in 2 processes, and writes nothing.
DSC_PEER_PYTHON names the interpreter of an environment with DeepSpeed and the same torch.
Run: python -m benchmarks.deepspeed_c.analyzer [--rounds 5] [--samples 1000000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

ROOT = Path(__file__).resolve().parents[2]
OURS, THEIRS, BOUND = "ours", "deepspeed", "the loop alone"
BATCH, WIDTH, PROCESSES = 1024, 16, 2
SKIPPED = 77


class Rows(Dataset):
    """Rows of tokens, of which the number that are not 0 is known from the index."""

    def __init__(self, n: int) -> None:
        self._n = n
        length = torch.arange(n) * 7919 % WIDTH + 1
        self._rows = (torch.arange(WIDTH) < length[:, None]).to(torch.int64)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._rows[i]


def n_tokens(batch: torch.Tensor) -> torch.Tensor:
    return (batch != 0).sum(dim=1)


def loop(data: Dataset, part: int) -> None:
    n = len(data)  # type: ignore[arg-type]
    mine = Subset(data, range(n * part // PROCESSES, n * (part + 1) // PROCESSES))
    for batch in DataLoader(mine, BATCH):
        n_tokens(batch)


def analyze(contender: str, n_samples: int, folder: str) -> dict[str, Any]:
    """Seconds of one analysis, and a checksum of its files."""
    torch.set_num_threads(1)
    data = Rows(n_samples)
    if contender == BOUND:
        workers = [multiprocessing.get_context("fork").Process(target=loop, args=(data, i)) for i in range(PROCESSES)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return {"seconds": time.perf_counter() - begin}
    if contender == OURS:
        from deepspeed_c.data.analyzer import DataAnalyzer
        from deepspeed_c.data.indexed import MMapIndexedDataset
    else:
        from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
        from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
    analyzer = DataAnalyzer(
        data,
        num_threads=PROCESSES,
        num_threads_reduce=PROCESSES,
        batch_size=BATCH,
        metric_names=["length"],
        metric_functions=[n_tokens],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=folder,
    )
    begin = time.perf_counter()
    analyzer.run_map()
    analyzer.run_reduce()
    seconds = time.perf_counter() - begin
    names = ("index_to_metric", "index_to_sample")
    values, samples = (MMapIndexedDataset(f"{folder}/length/length_{name}", skip_warmup=True) for name in names)
    digest = hashlib.sha256()
    for i in range(len(values)):
        digest.update(f"{int(values[i][0])}:{sorted(int(s) for s in samples[i])}".encode())
    return {"seconds": seconds, "digest": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--contender", choices=(OURS, THEIRS, BOUND), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(analyze(args.contender, args.samples, args.folder)))
        return
    peer = os.environ.get("DSC_PEER_PYTHON")
    if not peer:
        print("skipped: set DSC_PEER_PYTHON to the interpreter of an environment with DeepSpeed", file=sys.stderr)
        raise SystemExit(SKIPPED)
    from benchmarks.measure import machine, median_spread, ratios, require

    found: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: [], BOUND: []}
    for _ in range(args.rounds):
        for contender, results in found.items():
            with tempfile.TemporaryDirectory() as folder:
                python = peer if contender == THEIRS else sys.executable
                command = [python, str(Path(__file__).resolve()), "--contender", contender, "--folder", folder]
                done = subprocess.run(
                    [*command, "--samples", str(args.samples)], capture_output=True, text=True, check=False
                )
                require(done.returncode == 0, f"{contender} ends with exit code 0: {done.stderr[-2000:]}")
                results.append(json.loads(done.stdout.splitlines()[-1]))
    digests = {result["digest"] for name in (OURS, THEIRS) for result in found[name]}
    require(len(digests) == 1, "both write the same samples for each value")
    seconds = {name: [result["seconds"] for result in results] for name, results in found.items()}
    line = {"benchmark": "analyzer", "samples": args.samples, "seconds": round(median_spread(seconds[OURS])[0], 2)}
    line |= ratios("deepspeed_over_it", seconds[THEIRS], seconds[OURS])
    line |= ratios("ratio_to_bound", seconds[OURS], seconds[BOUND])
    print(json.dumps({**line, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
