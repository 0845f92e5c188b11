"""Options that several jobs have: GPUs and the wait for them, and how a text's vector is made and learned."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from domext_ray.config.options.declare import Main, Time, free, option_group, read_seconds

UseGpu = bool | Literal["auto"]
"""A GPU for each process, or not; auto until it is known how many GPUs there are."""
DryRun = bool | Literal["full"]
"""Whether a job only says what it would do; full: with all its options."""


@option_group
class GpuOptions:
    """The options of `--scale` that all jobs with several processes have."""

    # a GPU for each process; auto: if there are GPUs, or a cluster can add them
    use_gpu: Main[UseGpu] = free("auto")
    # time that a job waits for GPUs, or for room for any of its tasks and processes, before it gives up
    wait: Time = free("10m")

    @property
    def wait_seconds(self) -> float:
        """The seconds of `wait`."""
        return read_seconds(self.wait)

    @property
    def uses_gpu(self) -> bool:
        """Whether each process has a GPU; `auto` has been settled (`ray_cluster.resolve_gpu`)."""
        assert self.use_gpu != "auto"
        return self.use_gpu


Pooling = Literal["mean", "cls"]
"""How the states of a text's tokens become its vector (see `losses.pool_states`)."""
PoolingChoice = Literal["auto", "mean", "cls"]
"""The same where models are asked for vectors; auto: as each model was trained."""
LongTexts = Literal["cut", "windows"]
"""What is read of a text that is longer than a row: its beginning, or all of it in rows of their own."""
LongTextsChoice = Literal["auto", "cut", "windows"]
"""The same where a trained model is asked; auto: as it was trained."""
Views = Literal["dropout", "crop"]
"""What two views of a row are (see text/corpus/views.py)."""


@option_group
class VectorOptions:
    """A text's vector, and how it is learned without labels.

    infonce: within a group of rows, a row's first view must be nearest to its own second view (InfoNCE within a batch;
    SimCSE, Gao et al. 2021, arXiv 2104.08821). With --prepare.pair the views are two texts of the row, such as title
    and body.
    """

    gone: ClassVar = dict.fromkeys(("delete_prob", "decoder_layers"), "it was of tsdae, whose place infonce takes")

    pooling: Pooling = "mean"  # a text's vector, for sentence-transformers: its tokens' mean, or the first one's
    views: Views = "dropout"  # infonce: a row twice under different dropout, or two stretches of it
    # infonce: rows of a group; a divisor of the rows of a forward pass
    group_rows: Annotated[int, Field(ge=2, le=2**16)] = 16
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 0.05  # infonce: divisor of the cosines
