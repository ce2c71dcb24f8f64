"""Record how a diffusers pipeline calls its network, so that Atoll can call it in the same way.

No model family is known here: the pipeline itself is the adapter. It runs with a stand-in for its network, which
records the arguments of every call, and with a scheduler whose steps are recorded. One short call shows

- the *state*: the argument that equals the sample that the scheduler steps,
- the *time*: the only other argument that changes from step to step, a · time + b,
- the sign: the scheduler gets what the network returned, or its negative,
- the *conditioning*: all other arguments, under the network's own names. They depend on the prompt and the size.

So prediction(x, time) = sign · network(state=x, time=a · time + b, **conditioning). `trace` checks this before anybody
relies on it: the arguments of a batch are made of those of its images, and our own loop reaches the states of the
pipeline for another prompt, at another size, with another number of steps. Whatever does not fit is refused, with the
name of the argument.

What the network predicts, and for which noise, is in the configuration of the scheduler (`Process`). The time is sigma
in flow matching (1 is noise), and the step over 1000 for a table of betas. The steps of many schedulers have a
history, noise or another scale of the state, so the pipeline runs with one that has not: Euler in flow matching, DDIM
for tables. Both of them move x0 and noise, as the network predicts them, to the next time. So does our own loop.

The stand-in has the configuration and the methods of the network, but no weights. It lives on the meta device, where a
call gives the shapes of the outputs. Their values are a function of all arguments, so that a wrong argument shows.

Images become states by the inverse of the pipeline's own decoding: between its last step and its autoencoder, every
value of the state is moved, scaled and shifted (`Unpacking`). Three probes find these numbers, a fourth checks them.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.names import Prediction
from atoll.core.networks import TraceSpec
from atoll.core.sizes import Size
from atoll.nets.arguments import Arguments, bound, find_batching, join, same
from atoll.nets.base import network_arguments, prediction

CONVENTIONS = ((1000.0, 0.0), (1.0, 0.0), (-1.0, 1.0), (-1000.0, 1000.0))
"""Usual pairs (a, b) of network time = a · time + b. A fit next to one of them is rounded to it: some pipelines
compute the time in bfloat16, which has 8 significant bits."""
FIT_STEPS, CHECK_STEPS = 5, 3
"""Steps of the call that a and b are fitted to, and of the call that is compared. Two points always fit a line."""
TOLERANCE = 1e-4
"""Largest difference between our own loop and the pipeline, relative to the RMS of the state."""
PROMPTS = ("a red cube", "three small boats on a lake in the evening, seen from a hill")
"""Prompts of different lengths. An argument that differs between them depends on the prompt."""
FLOW = "flow_prediction"
"""Prediction type of schedulers that serve several kinds of networks. Those of flow matching alone have none."""
PREDICTS: dict[str, Prediction] = {"epsilon": "epsilon", "v_prediction": "v_prediction", "sample": "x0"}
"""Other prediction types of diffusers, and our names of them."""
BETAS = {"linear": "ddpm-linear", "scaled_linear": "ddpm-scaled-linear", "squaredcos_cap_v2": "ddpm-cosine"}
"""Tables of betas in diffusers, and our names of them."""
REWRITES = re.compile(r"instruction|enhance|rewrite|upsampl|expand_prompt|clean_caption")
"""Options of a pipeline that change the prompt. They are switched off: experts are trained on captions as they are."""
SCALES = re.compile(r"(true_)?(guidance|cfg)_scale")
"""Options of classifier-free guidance, which some pipelines switch off at 1 and others at 0. A distilled guidance, an
argument of the network, has the same name in some pipelines, so the default is tried first."""


class UntraceableError(AtollError):
    """A pipeline cannot be traced; the message names the argument."""


class Stopped(Exception):  # noqa: N818 - not an error: it ends a call of the pipeline
    """Ends a pipeline's call when everything needed is recorded."""


@dataclass(frozen=True)
class Step:
    """One step of the scheduler, and the network calls before it."""

    time: float
    """On the [0, 1] of the noise schedule."""
    next_time: float
    sample: Tensor
    output: Tensor
    """What the pipeline passes to the scheduler."""
    result: Tensor
    calls: tuple[tuple[Arguments, Any], ...]
    """Arguments and output of each call."""


class Process(NamedTuple):
    """What a network predicts for which noise, and a scheduler that shows it: deterministic, and of first order."""

    scheduler: Any
    prediction: Prediction
    schedule: flow.Schedule

    @classmethod
    def of(cls, scheduler: Any) -> "Process":
        """Read the configuration of a pipeline's scheduler; raise `UntraceableError` for what is unknown."""
        import diffusers

        config, name = scheduler.config, f"its {type(scheduler).__name__}"
        predicts, betas = config.get("prediction_type", FLOW), config.get("beta_schedule")
        if predicts == FLOW and hasattr(scheduler, "sigmas"):
            if config.get("use_flow_sigmas"):  # several steps together
                euler = diffusers.FlowMatchEulerDiscreteScheduler
                scheduler = euler.from_config(config, shift=config.get("flow_shift", 1.0))
            return cls(scheduler, "velocity", flow.LINEAR)
        ddim = diffusers.DDIMScheduler
        if predicts not in PREDICTS or type(scheduler).__name__ not in ddim._compatibles:
            raise UntraceableError(f"{name} with the prediction type {predicts} is unknown")
        # Options that change more than the steps of the solver
        for option in ("trained_betas", "rescale_betas_zero_snr", "thresholding", "use_flow_sigmas"):
            if config.get(option):
                raise UntraceableError(f"{name} has {option}, which Atoll's noise schedules and samplers do not have")
        if betas not in BETAS or config.get("timestep_type", "discrete") != "discrete":
            raise UntraceableError(f"{name} has no table of betas ({betas}) with a number for each step")
        ends = {} if betas == "squaredcos_cap_v2" else {key: config[key] for key in ("beta_start", "beta_end")}
        schedule = flow.schedule(BETAS[betas], steps=config.num_train_timesteps, **ends)
        table = torch.tensor(schedule.alphas_cumprod)  # type: ignore[attr-defined]
        if not torch.allclose(table, scheduler.alphas_cumprod.cpu().float(), rtol=1e-4):
            raise UntraceableError(f"{name} has another table of alphas_cumprod than its betas give")
        # With these options, each step begins where the one before has ended, for any number of steps.
        steps = {"timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": False}
        return cls(ddim.from_config(config, **steps, clip_sample=False), PREDICTS[predicts], schedule)

    def following(self, output: Tensor, x: Tensor, time: float, next_time: float) -> Tensor:
        """Move states x (batch, …) to the next time, by the x0 and the noise that the network predicts."""
        now, then = torch.tensor([[time], [next_time]], device=x.device)
        pair = flow.to_pair(output, x, now, prediction=self.prediction, schedule=self.schedule)
        return self.schedule.add_noise(pair.x0, pair.eps, then)


class StandIn:
    """The network of a pipeline, without weights: its methods and its configuration, and a call that is recorded."""

    def __init__(self, network: Any, call: Callable[[Arguments], Any], device: torch.device) -> None:
        self._network, self._call, self.device = network, call, device
        self._signature = inspect.signature(type(network).forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(bound(self._signature, args, kwargs))


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta", torch.float32 if leaf.is_floating_point() else leaf.dtype)  # the network is in float32


@contextmanager
def replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of an object for a while, past its own `__setattr__`."""
    before = {name: vars(target)[name] for name in attributes if name in vars(target)}
    for name, value in attributes.items():
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            object.__delattr__(target, name)
        for name, value in before.items():
            object.__setattr__(target, name, value)


@dataclass(frozen=True, eq=False)
class Recorder:
    """A pipeline whose calls are recorded."""

    pipe: Any
    slot: str
    """The component that is the network: transformer or unet."""
    network: Any
    """The same network on the meta device."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call of the pipeline."""
    scheduler: Any = None
    """Instead of the pipeline's own."""

    def run(
        self,
        prompts: Sequence[str],
        size: Size,
        *,
        steps: int,
        seed: int = 0,
        network: Callable[[Arguments], Any] | None = None,
        last: Tensor | None = None,
        **options: Any,
    ) -> list[Step]:
        """Call the pipeline and return the scheduler's steps. `last` replaces the result of the last one."""
        scheduler = self.scheduler or self.pipe.scheduler
        original, parameters = scheduler.step, inspect.signature(scheduler.step)
        calls: list[tuple[Arguments, Any]] = []
        found: list[Step] = []

        def call(arguments: Arguments) -> Any:
            calls.append((arguments, (network or self.imitate)(arguments)))
            return calls[-1][1]

        def step(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            before, output = given["sample"].clone(), given["model_output"].clone()
            result = original(*args, **kwargs)
            moved = result[0]
            if hasattr(scheduler, "sigmas"):
                time, following = scheduler.sigmas[len(found) : len(found) + 2].tolist()
            else:
                count, now = scheduler.config.num_train_timesteps, int(given["timestep"])
                past = max(now - count // scheduler.num_inference_steps, 0)
                time, following = now / (count - 1), past / (count - 1)
            found.append(Step(time, following, before, output, moved.clone(), tuple(calls)))
            calls.clear()
            if last is not None and len(found) == steps:
                moved.copy_(last.reshape(moved.shape))
            return result

        call_options = {
            "output_type": "latent",
            "generator": [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))],
            "height": size.height,
            "width": size.width,
            "num_inference_steps": steps,
            **self.options,
            **options,
        }
        stand_in = StandIn(self.network, call, torch.device(self.pipe._execution_device))
        parts = {self.slot: stand_in, "scheduler": scheduler}
        replacements = replaced(self.pipe, **parts), replaced(scheduler, step=step)
        with replacements[0], replacements[1], torch.no_grad(), suppress(Stopped):
            self.pipe(prompt=list(prompts), **call_options)
        return found

    def arguments(self, prompts: Sequence[str], size: Size) -> Arguments:
        """Return the arguments of the network's first call for these prompts."""
        recorded: list[Arguments] = []

        def stop(arguments: Arguments) -> Any:
            recorded.append(arguments)
            raise Stopped

        self.run(prompts, size, steps=CHECK_STEPS, network=stop)
        return recorded[0]

    def imitate(self, arguments: Arguments, state: str | None = None) -> Any:
        """Return an output with the structure of the network's, whose values depend on all arguments."""
        candidates = {name: found for name, value in arguments.items() if (found := _state_tensor(value)) is not None}
        try:
            shapes = self.network(**tree_map(_to_meta, arguments))
        except NotImplementedError:
            # It reads values, which tensors on the meta device do not have. Most networks return such a tuple; a wrong
            # guess shows when the network is opened.
            shapes = (arguments[state or next(iter(candidates))],)
        if state is None:  # not known yet: an argument with as many values as the output
            values = sum(leaf.numel() for leaf in tree_leaves(shapes) if isinstance(leaf, Tensor))
            state = next((name for name, own in candidates.items() if values in (own.numel(), 2 * own.numel())), None)
        if state is None:
            return tree_map(lambda leaf: torch.zeros(leaf.shape) if isinstance(leaf, Tensor) else leaf, shapes)
        others = (arguments[name] for name in sorted(arguments) if name != state)
        tensors = [leaf.double() for leaf in tree_leaves(list(others)) if isinstance(leaf, Tensor)]
        mark = sum((torch.sin((3 + place) * leaf.mean()).item() for place, leaf in enumerate(tensors)), 0.0)
        value = torch.tanh(0.7 * candidates[state].float() + 0.2 * mark)
        rows = iter(value)

        def fill(shape: Any) -> Any:
            if not isinstance(shape, Tensor):
                return shape
            part = value if shape.numel() >= value.numel() else next(rows)  # a list has a tensor for each image
            if shape.numel() == 2 * part.numel():  # with a learned variance
                part = torch.cat([part, -part], _different(shape, part))
            return part.reshape(shape.shape).to(shape.dtype)

        return tree_map(fill, shapes)


def trace(recorder: Recorder, size: Size, other: Size) -> tuple[TraceSpec, Recorder, list[str]]:
    """Find out how a pipeline calls its network, and check it.

    Return also the recorder with the options that it needs, and notes about what was switched off.
    """
    own, process = recorder.pipe.scheduler, Process.of(recorder.pipe.scheduler)
    recorder, state, notes = _without_guidance(replace(recorder, scheduler=process.scheduler), size)
    if own.config.get("clip_sample"):
        notes.append("clip_sample is off: the predicted latents are not clipped")
    if type(process.scheduler) is not type(own):
        notes.append(f"traced with {type(process.scheduler).__name__} instead of {type(own).__name__}")
    steps = recorder.run(PROMPTS[:1], size, steps=FIT_STEPS, network=lambda own: recorder.imitate(own, state))
    calls = {len(step.calls) for step in steps}
    if len(steps) < FIT_STEPS - 1 or calls != {1}:
        raise UntraceableError(
            f"in {FIT_STEPS} steps the pipeline makes {len(steps)} scheduler steps with {calls} network calls each"
        )

    # Time and sign
    first = steps[0].calls[0][0]
    rest = [name for name in first if name != state]
    changing = [name for name in rest if not all(same(first[name], step.calls[0][0][name]) for step in steps)]
    if len(changing) != 1:
        raise UntraceableError(
            f"one argument of the network may change with the time, but these do: {', '.join(changing) or 'none'}"
        )
    time = changing[0]
    rest.remove(time)
    times = [step.calls[0][0][time] for step in steps]
    if not all(isinstance(value, Tensor) and value.numel() == 1 for value in times):
        raise UntraceableError(f"the argument {time} changes with the time, but is not one number for each image")
    known = process.schedule.timestep(torch.tensor([step.time for step in steps], dtype=torch.float64)) / 1000
    scale, offset = _fit_line(known, times, time)
    signs = {_sign(step) for step in steps}
    if signs not in ({1}, {-1}):
        raise UntraceableError("the scheduler gets neither the network's output nor its negative")

    # Conditioning: how batches are made of single images, and what depends on the prompt
    one, two, wide, two_wide = (recorder.arguments([prompt], own) for own in (size, other) for prompt in PROMPTS)
    pair = recorder.arguments([PROMPTS[0]] * 2, size)
    batching = {name: find_batching(one[name], pair[name], name) for name in rest}
    for name in rest:
        if not same(first[name], one[name]):
            raise UntraceableError(f"the argument {name} differs between two equal calls of the pipeline")
        if not same(join([one[name]] * 2, batching[name]), pair[name], tolerance=1e-4):
            raise UntraceableError(f"the argument {name} of two images is not made of those of single images")
    by_prompt = tuple(name for name in rest if not (same(one[name], two[name]) and same(wide[name], two_wide[name])))
    if not by_prompt:
        raise UntraceableError("no argument of the network depends on the prompt; is it cut off before its first word?")
    given = first[state]
    shape = given.shape[1:] if isinstance(given, Tensor) else given[0].shape
    if len([size for size in shape if size != 1]) not in (2, 3):
        raise UntraceableError(f"the state {state} of an image has the shape {tuple(shape)}, neither tokens nor a grid")
    found = TraceSpec(
        state=state,
        state_shape=tuple(shape),
        state_list=isinstance(given, list),
        time=time,
        scale=scale,
        offset=offset,
        sign=1 if signs == {1} else -1,
        batching=batching,
        by_prompt=by_prompt,
        options=json.loads(json.dumps(recorder.options)),
        prediction=process.prediction,
        schedule=process.schedule.spec.model_dump(mode="json"),
    )

    # Our own loop against the pipeline: another prompt, size and number of steps
    steps = recorder.run(
        PROMPTS[1:], other, steps=CHECK_STEPS, seed=1, network=lambda own: recorder.imitate(own, state)
    )
    x = steps[0].sample.float()
    for step in steps:
        now = process.schedule.timestep(torch.tensor([step.time], dtype=torch.float64)) / 1000
        made, dtype = network_arguments(found, x, now, [two_wide]), step.calls[0][0][time].dtype
        made[time] = (made[time] if dtype.is_floating_point else made[time].round()).to(dtype)
        output = found.sign * prediction(recorder.imitate(made, state), x)
        x = process.following(output, x, step.time, step.next_time)
    goal = steps[-1].result
    error = ((x - goal).square().mean() / goal.square().mean()).sqrt().item()
    if not error <= TOLERANCE:
        name = type(process.scheduler).__name__
        raise UntraceableError(f"Atoll's own loop differs from the pipeline with its {name} by {error:.1e} at {other}")
    return found, recorder, notes


def _without_guidance(recorder: Recorder, size: Size) -> tuple[Recorder, str, list[str]]:
    """Switch guidance and changed prompts off. Return the recorder, the name of the state, and notes."""
    known = inspect.signature(recorder.pipe.__call__).parameters
    if "prompt" not in known:
        raise UntraceableError(
            f"the pipeline takes no prompt, only {', '.join(name for name in known if name != 'self')}"
        )
    options, notes = dict(recorder.options), []
    for name, parameter in known.items():
        if REWRITES.search(name) and parameter.default and name not in options:
            options[name] = False if parameter.default is True else None
            notes.append(f"{name} is off: prompts are used as they are")
    if "use_resolution_binning" in known:
        options.setdefault("use_resolution_binning", False)
    scales = [name for name in known if SCALES.fullmatch(name) and name not in options]
    reason = UntraceableError("")
    for value in (None, 1.0, 0.0):
        chosen = {} if value is None else dict.fromkeys(scales, value)
        tried = replace(recorder, options=options | chosen)
        try:
            step = tried.run(PROMPTS[:1], size, steps=2)[0]
            if len(step.calls) != 1:
                raise UntraceableError(
                    f"the pipeline calls its network {len(step.calls)} times a step, and no option stops it"
                )
            return tried, _state_name(step), notes + [f"{name} is {value:g}: no guidance" for name in chosen]
        except (UntraceableError, RuntimeError) as error:
            reason = error if isinstance(error, UntraceableError) else UntraceableError(f"the pipeline fails: {error}")
    raise reason


def _state_name(step: Step) -> str:
    """Return the argument that equals the scheduler's sample."""
    arguments, sample = step.calls[0][0], step.sample.squeeze().float()
    larger = []
    for name, value in arguments.items():
        tensor = _state_tensor(value)
        if tensor is None:
            continue
        if tensor.squeeze().shape == sample.shape and torch.allclose(
            tensor.squeeze().float(), sample, rtol=1e-2, atol=1e-2
        ):
            return name
        if tensor.ndim >= step.sample.ndim and tensor.numel() > sample.numel():
            larger.append(name)
    hint = f"; {', '.join(larger)} may have it as a part" if larger else ""
    raise UntraceableError(f"no argument of the network equals the sample that the scheduler steps{hint}")


def _state_tensor(value: Any) -> Tensor | None:
    """Return an argument that could be the state, as one tensor."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, Tensor) and part.shape == value[0].shape for part in value)
    ):
        return torch.stack(value)
    return value if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2 else None


def _fit_line(x: Tensor, values: Sequence[Tensor], name: str) -> tuple[float, float]:
    """Return (a, b) of value = a · x + b."""
    y = torch.stack([value.reshape(()).double() for value in values])
    a, b = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y[:, None]).solution[:, 0].tolist()
    # Relative to the largest value: rounding of the time, in the pipeline and in the scheduler.
    precision = max(1e-5, 2 * torch.finfo(values[0].dtype).eps) if values[0].is_floating_point() else 1e-3
    for line in (*CONVENTIONS, (a, b)):
        if (line[0] * x + line[1] - y).abs().max() <= precision * y.abs().max():
            return line
    pairs = ", ".join(f"{one:.4g} at {other:.4g}" for one, other in zip(y.tolist(), x.tolist(), strict=True))
    raise UntraceableError(f"the argument {name} is not a · time + b: {pairs}")


def _sign(step: Step) -> int:
    """Return 1 if the scheduler gets the network's output, -1 if it gets the negative, 0 otherwise."""
    output, sent = prediction(step.calls[0][1], step.sample).float(), step.output.float()
    if sent.numel() != output.numel():
        return 0
    close = (torch.allclose(sign * output.reshape(sent.shape), sent, rtol=1e-5, atol=1e-6) for sign in (1, -1))
    return next((sign for sign, equal in zip((1, -1), close, strict=True) if equal), 0)


def _different(one: Tensor, two: Tensor) -> int:
    """Return the first dimension with different sizes."""
    return next(place for place, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b)


# Images and states


@dataclass(frozen=True)
class Unpacking:
    """From the state of an image to the input z of the decoder: z = scale · state[order] + shift, value by value."""

    order: Tensor
    scale: Tensor
    shift: Tensor
    shape: tuple[int, ...]
    """Shape of z for one image."""

    def unpack(self, state: Tensor) -> Tensor:
        """Return z (batch, …) of states (batch, …)."""
        return (state.flatten(1)[:, self.order] * self.scale + self.shift).reshape(-1, *self.shape)

    def pack(self, z: Tensor) -> Tensor:
        """Return states (batch, values) of z (batch, …)."""
        flat = (z.flatten(1) - self.shift) / self.scale
        return torch.empty_like(flat).index_copy_(1, self.order, flat)


def unpacking(recorder: Recorder, size: Size) -> Unpacking:
    """Find the map from the state to the latents of the autoencoder, in the pipeline's own path."""
    sample = recorder.run(PROMPTS[:1], size, steps=1)[0].sample
    values = sample.numel()

    def decoder_input(state: Tensor) -> Tensor:
        found: list[Tensor] = []

        def decode(z: Tensor, *_: Any, **__: Any) -> Any:
            found.append(z.float().cpu())
            raise Stopped

        # Pipelines may cast the state to the autoencoder's precision, and half precision cannot count its values. With
        # a single step, some end with the predicted x0.
        vae, dtype = recorder.pipe.vae, recorder.pipe.vae.dtype
        with replaced(vae.float(), decode=decode):
            recorder.run(PROMPTS[:1], size, steps=2, last=state, output_type="pt")
        nn.Module.to(vae, dtype)  # diffusers' own method warns about dtypes
        if not found:
            raise UntraceableError("the pipeline does not call the method decode of its autoencoder")
        return found[0]

    zero = decoder_input(torch.zeros(values))
    shift = zero.double().reshape(-1)
    scale = decoder_input(torch.ones(values)).double().reshape(-1) - shift
    ramp = decoder_input(torch.arange(values) / values).double().reshape(-1)
    order = ((ramp - shift) / scale * values).round().long()
    if scale.numel() != values or not torch.equal(order.sort().values, torch.arange(values)):
        raise UntraceableError(
            "the pipeline does not pass every value of the state to its autoencoder once, scaled and shifted"
        )
    found = Unpacking(order, scale.float(), shift.float(), tuple(zero.shape[1:]))
    check = torch.randn(1, values, generator=torch.Generator().manual_seed(1))
    error = (found.unpack(check) - decoder_input(check)).abs().max().item()
    if not error <= 1e-3:
        raise UntraceableError(
            f"the latents of the autoencoder are not an affine function of the state: they differ by {error:.1e}"
        )
    return found
