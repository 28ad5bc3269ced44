"""Finished shards of a run as all ranks see them: rank 0 alone writes, and shows what it wrote.

What follows a layer uses the tensors that `read` returns, which are those on disk, on every rank.
It does not know how files are made durable (`quant.artifact.writer`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quant.artifact.writer import ArtifactWriter
from quant.parallel import Ranks
from quant.provenance import read_results, store_kv_result, store_results
from quant.report import KVLayerResult, ModuleResult


class LayerStore:
    """Shard 0 is what lies outside the layers, shard i + 1 is layer i."""

    def __init__(self, writer: ArtifactWriter | None, ranks: Ranks) -> None:
        """writer: rank 0's; None on the others."""
        assert (writer is not None) == (ranks.rank == 0)
        self._writer, self._ranks = writer, ranks
        self._committed = set(ranks.first(lambda: self._local.committed))

    @property
    def committed(self) -> frozenset[int]:
        """Shards already durable, from this run or an earlier one of the same job."""
        return frozenset(self._committed)

    def commit(
        self, shard: int, tensors: Mapping[str, Tensor], results: Mapping[str, ModuleResult]
    ) -> None:
        """Make a shard and its rows of the report durable, the shard last."""
        if self._writer is not None:
            store_results(self._writer, shard, results)
            self._writer.write_shard(shard, tensors)
        self._committed.add(shard)

    def keep_kv(self, result: KVLayerResult) -> None:
        """Make a layer's row of the KV report durable; call before the layer is committed."""
        if self._writer is not None:
            store_kv_result(self._writer, result)

    def read(self, shard: int) -> dict[str, Tensor]:
        """The tensors of a committed shard, read back from disk."""
        return self._ranks.first_tensors(lambda: self._local.read_shard(shard))

    def results(self, shard: int) -> dict[str, ModuleResult]:
        """The rows of the report of a committed shard; none but on rank 0, which reports."""
        return {} if self._writer is None else read_results(self._writer, shard)

    @property
    def _local(self) -> ArtifactWriter:
        assert self._writer is not None, "only rank 0 is asked"
        return self._writer
