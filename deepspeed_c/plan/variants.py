"""Variants of a simulated step: faster links, another ZeRO stage, second shards (``--what-if``)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError, DeepSpeedCError
from deepspeed_c.plan.script import Found
from deepspeed_c.plan.simulated import PlannedStep, plan_step
from deepspeed_c.plan.simulation import Cluster

__all__ = ["Variant", "VariantRow", "parse_variants", "plan_variants"]

_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")
_ZERO = "zero_optimization"
# The name of a variant -> its key in the section of ZeRO.
_KEYS = {"stage": "stage", "hpz": "zero_hpz_partition_size"}


class Variant(NamedTuple):
    """One change."""

    name: str
    """As it was written: ``link=2x``."""
    keys: Mapping[str, int]
    """Changed keys of the section ``zero_optimization``."""
    link: float = 1.0
    """A factor for the rates of all links."""

    def source(self, source: Any) -> Any:
        """The configuration ``source`` with the variant's keys."""
        if not self.keys:
            return source
        changed = copy.deepcopy(dict(read_source(source).keys))
        changed[_ZERO] = {**changed.get(_ZERO, {}), **self.keys}
        return changed

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster with the variant's links."""
        links = tuple(
            link._replace(
                bytes_per_s=max(round(link.bytes_per_s * self.link), 1),
                inner_bytes_per_s=round(link.inner_bytes_per_s * self.link),
            )
            for link in cluster.machine.links
        )
        return cluster._replace(machine=cluster.machine._replace(links=links))


class VariantRow(NamedTuple):
    """A variant with its step, or the reason why there is none."""

    variant: Variant
    planned: PlannedStep | None
    refusal: str = ""


def parse_variants(text: str) -> list[Variant]:
    """Reads ``link=2x,hpz=8,stage=2``. Raises ConfigError for other text."""
    return [_parse(word) for word in text.split(",")]


def _parse(word: str) -> Variant:
    name, _, value = word.partition("=")
    factor = _FACTOR.fullmatch(value)
    if name == "link" and factor is not None and 0 < float(factor[1]) <= 1e6:
        return Variant(word, {}, float(factor[1]))
    if name in _KEYS and value.isdecimal() and len(value) < 10:
        return Variant(word, {_KEYS[name]: int(value)})
    raise ConfigError(
        f"{word!r} is not understood",
        where="--what-if",
        fix="write link=2x, stage=2 or hpz=8; several with commas are one variant each",
    )


def plan_variants(
    variants: list[Variant],
    found: Found,
    source: Any,
    cluster: Cluster,
    **shared: Any,
) -> list[VariantRow]:
    """Simulates a step of each variant. shared: further arguments of ``plan_step``. A variant that it refuses has a row
    with the reason."""
    rows = []
    for variant in variants:
        try:
            planned = plan_step(found, variant.source(source), variant.cluster(cluster), **shared)
            rows.append(VariantRow(variant, planned))
        except DeepSpeedCError as error:
            rows.append(VariantRow(variant, None, f"{error.where}: {error.what}" if error.where else error.what))
    return rows
