"""Options of sampling and of loading networks: fields of verbs, server and library.

The docstrings of the fields are the help texts. No torch here: the command line imports this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from tyro.conf import Positional, Suppress, arg

from atoll.core.errors import AtollError, unknown
from atoll.core.names import OWN_SOLVERS, SOLVERS, DTypeName, GuidanceName, GuidanceWeights, SolverName

Overrides = Annotated[Mapping[str, Any], Suppress]
"""Settings of a run by dotted key. On the command line, `--section.key VALUE` is removed before tyro parses the rest.
"""
RunArgument = Annotated[Positional[str | Path], arg(metavar="RUN")]
Options = TypeVar("Options")


def part(kind: type[Options], options: Options) -> Options:
    """Return the fields of `kind` among larger options, which inherit from it."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How every set of images is sampled."""

    guidance_scale: float = 4.0  # that of DiT's sampling script
    """Guidance scale; 1 disables guidance."""
    guidance: GuidanceName = "classifier-free"
    """Guide away from the velocity without the prompt, or (autoguidance) from that of the weak network of training."""
    guidance_weights: GuidanceWeights = "separate"
    """Expert weights of the unconditional velocity: those of the prompt, or those of the router without the prompt."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """Interval of times t (0 is data, 1 is noise) in which guidance is applied."""
    rescale: float = 0.0
    """Guidance rescale from 0 to 1: moves the standard deviation of the guided velocity to that of the conditional."""
    seed: int = 0
    """Random seed of the initial noise."""
    shift: float = 1.0
    """Timestep shift; values above 1 take more steps at high noise."""

    def __post_init__(self) -> None:
        if self.guidance not in get_args(GuidanceName):
            raise AtollError(unknown("guidance", self.guidance, get_args(GuidanceName)))
        if self.guidance_weights not in get_args(GuidanceWeights):
            raise AtollError(unknown("guidance weights", self.guidance_weights, get_args(GuidanceWeights)))
        if self.shift <= 0:
            raise AtollError(f"expected shift > 0, got {self.shift}")
        low, high = self.guidance_interval
        if not 0 <= self.rescale <= 1 or not 0 <= low <= high <= 1:
            raise AtollError(
                "expected rescale in [0, 1] and a guidance interval in [0, 1], got "
                f"{self.rescale} and {self.guidance_interval}"
            )


@dataclass(frozen=True, kw_only=True)
class SampleSettings(SamplingOptions):
    """All sampling settings of an image. Every image file contains them as metadata."""

    steps: int = 50  # those of Paris and HDDM
    """Number of solver steps."""
    solver: SolverName = "euler"
    """ODE solver."""
    routing: str = "top-1"  # the best strategy of DDM
    """Rule: full, top-K, threshold-P, nucleus-P, drawn, once, sample-1, oracle, nearest; over time: top-2@0.6,top-1."""
    scheduler_times: bool = False
    """Use the scheduler's own timesteps with --solver flow-euler or flow-heun, as diffusers pipelines and Paris do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in SOLVERS:
            raise AtollError(unknown("solver", self.solver, SOLVERS))
        if self.steps < 1:
            raise AtollError(f"expected steps >= 1, got {self.steps}")
        if self.scheduler_times and self.solver in OWN_SOLVERS:
            raise AtollError(
                f"scheduler_times needs a diffusers solver such as flow-euler, got {self.solver}: euler and heun have "
                "no diffusers scheduler"
            )

    def for_steps(self, steps: int | None) -> Self:
        """Return the settings of few-step students, who learned their steps and guidance; None changes nothing."""
        if steps is None:
            return self
        return replace(self, steps=steps, solver="euler", shift=1.0, scheduler_times=False, guidance_scale=1.0)

    def guidance_at(self, t: float) -> float:
        """Return the guidance scale at a time: 1 outside the guidance interval."""
        low, high = self.guidance_interval
        return self.guidance_scale if low <= t <= high else 1.0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How networks are loaded for sampling."""

    max_loaded_experts: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Maximum number of experts on each device at once."""
    devices: Annotated[str | None, arg(metavar="LIST", help_behavior_hint="(default: all visible GPUs, else cpu)")] = (
        None
    )
    """Devices to spread the experts over, such as cuda:0,cuda:1."""
    dtype: Annotated[DTypeName, arg(help_behavior_hint="(default: bfloat16 on GPUs, float32 on CPUs)")] = "auto"
    """Precision of the networks."""
    compile: bool = False
    """Compile the networks with torch.compile."""
    base: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="(default: from the hub)")] = None
    """Folder of the base model of exported adapters."""

    @property
    def precision(self) -> str:
        """Dtype of the networks, with `auto` resolved."""
        from atoll.core.device import compute_dtype, dtype_name, parse_devices

        return dtype_name(compute_dtype(parse_devices(self.devices)[0], self.dtype))

    def in_float32(self) -> Self:
        """Return the options of validation, which is in float32 on every device."""
        return replace(self, dtype="float32", compile=False)


@dataclass(frozen=True, kw_only=True)
class QuantizedLoadOptions(LoadOptions):
    """How networks are loaded to sample, but not to measure them: their weights may be rounded."""

    quantize: Annotated[Literal["int8"] | None, arg(metavar="int8", help_behavior_hint="(default: off)")] = None
    """Store the weights of linear layers as 8-bit integers."""
