"""Everything that depends on JAX's internals or on its version, in one place.

Written for jax 0.10.2 to 0.12. Nothing outside this file asks for a version or touches a manual axis type.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import threading
import types
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax import export, lax
from jax._src.config import _check_vma
from jax._src.core import get_axis_env
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.state.types import TransformedRef
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Effect, Jaxpr, Primitive
from jax.interpreters import mlir
from jax.interpreters.mlir import ir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxlib.mlir.dialects import stablehlo
from jaxtyping import Array

from trencadis.core.target import Target

ANY_TPU = "TPU7x"  # the kind that kernels are lowered for where it is not known; tiles have one size on all

T = TypeVar("T")
IrValue: TypeAlias = ir.Value[ir.Type]  # an operand or result of a lowered operation
Ref: TypeAlias = Array | TransformedRef  # a reference of a kernel: a tracer, or a view of one
Value: TypeAlias = Array | np.ndarray  # an argument of a rule or a callback: numpy's where JAX does not convert it
V = TypeVar("V", bound=Value)

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])

# XLA:CPU of jax < 0.12 turns a slice of a narrow float array inside a loop into a conversion of the whole array.
SLICES_WIDEN_NARROW_FLOATS = JAX < (0, 12)

# Mosaic GPU of jax < 0.11 has another register layout, in which bfloat16 numbers cannot be widened in place.
WIDENS_IN_PLACE = JAX >= (0, 11)


def varying_axes(x: Value) -> frozenset[Hashable]:
    """The manual mesh axes over which x varies inside `jax.shard_map`; empty outside."""
    axes: frozenset[Hashable] = jax.typeof(x).manual_axis_type.varying
    return axes


def vary_alike(*xs: V) -> tuple[V, ...]:
    """The arrays, each varying over every manual mesh axis that one of them varies over."""
    axes = [varying_axes(x) for x in xs]
    union = frozenset().union(*axes)
    return tuple(
        lax.pcast(x, tuple(sorted(union - mine, key=str)), to="varying") if union - mine else x
        for x, mine in zip(xs, axes, strict=True)
    )


def vary_over(x: V, axes: tuple[Hashable, ...]) -> V:
    """The array, varying over these manual mesh axes too."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def mesh_platform() -> str | None:
    """The platform of the devices of the mesh in use, such as "cpu", "gpu" or "tpu"; None if it is not known."""
    chosen = current_target()
    if chosen is not None:
        return chosen.platform
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    known: str | None = getattr(device, "platform", None)  # an abstract device of jax < 0.11 may have none
    return known or ("tpu" if device.device_kind.startswith("TPU") else device.device_kind)


def result_type(operands: tuple[ShapedArray, ...], shape: tuple[int, ...], dtype: DTypeLike) -> ShapedArray:
    """The type of a result that varies as its operands do and is sharded over no automatic axis by itself."""
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return ShapedArray(shape, dtype)
    varying = frozenset().union(*(x.manual_axis_type.varying for x in operands))
    return ShapedArray(
        shape,
        dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))),
        manual_axis_type=operands[0].manual_axis_type.update(varying=varying),
    )


def vmapped_axes() -> frozenset[Hashable]:
    """The explicit mesh axes that `jax.vmap` maps over here, and which nothing else can be sharded over."""
    axes: frozenset[Hashable] = get_axis_env().explicit_mesh_axis_names
    return axes


named_target = jax.make_user_context(None)  # the Target to plan for, a part of the keys of JAX's caches; or None


def current_target() -> Target | None:
    """The target that `named_target` is set to in this thread, or None."""
    chosen: Target | None = named_target.value
    return chosen


def target(context: mlir.LoweringRuleContext, platform: str) -> Target:
    """The target that is lowered for: the kind of device, its cores and its architecture, where they are known.

    They are those of the named target, of the abstract device of the mesh in use, of the devices of the mesh or of the
    computation, or of the client that will compile it, all devices of which are of one kind.
    """
    chosen, module = current_target(), context.module_context
    split, exported = partitioned(context), bool(module.lowering_parameters.for_export)
    if chosen is not None and chosen.platform == platform and chosen.kind is not None:
        return dataclasses.replace(chosen, partitioned=split, exported=exported)
    axes, client = module.axis_context, module.backend
    names = (platform, "gpu") if platform in ("cuda", "rocm") else (platform,)  # devices of both are called "gpu"
    meshes = (getattr(axes, "mesh", None), jax.sharding.get_abstract_mesh())
    abstract = [getattr(mesh, "abstract_device", None) for mesh in meshes]
    devices: list[Any] = [device for device in abstract if device is not None]
    devices += [device for mesh in meshes if isinstance(mesh, jax.sharding.Mesh) for device in mesh.devices.flat]
    devices += getattr(axes, "device_assignment", None) or ()
    devices += client.devices() if client is not None and client.platform in names else ()
    # an abstract device of jax < 0.11 has no platform
    devices = [device for device in devices if getattr(device, "platform", platform) in names]
    if not devices:
        return Target(platform=platform, partitioned=split, exported=exported)
    kind, cores, arch = devices[0].device_kind, None, None
    if platform in ("cuda", "rocm"):
        cores = getattr(devices[0], "core_count", None) or getattr(devices[0], "num_cores", None)
        arch = getattr(devices[0], "compute_capability", None)
    return Target(platform=platform, kind=kind, cores=cores, arch=arch, partitioned=split, exported=exported)


def partitioned(context: mlir.LoweringRuleContext) -> bool:
    """Whether what is lowered will be split over devices by XLA: on several of them, and not inside `jax.shard_map`."""
    axes: Any = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:
        return any(size > 1 for name, size in mesh.shape.items() if name not in axes.manual_axes)
    return getattr(axes, "num_devices", 1) > 1


def newly_manual_axes(params: dict[str, Any]) -> frozenset[Hashable]:
    """The mesh axes that a `shard_map` equation with these parameters makes manual."""
    axes: frozenset[Hashable] = params["newly_manual_axes"]
    return axes


@functools.cache
def interpreter_effects() -> set[Effect]:
    """The effects of a kernel that is interpreted: its memory is on the host, behind ordered callbacks."""
    return set(jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects)


def require_devices(primitive: Primitive) -> None:
    """Say of a primitive that its lowering needs to know the devices: without them the mesh is not known there."""
    prim_requires_devices_during_lowering.add(primitive)


def without_vma() -> AbstractContextManager[object]:
    """A context in which types do not say over which manual mesh axes an array varies."""
    return _check_vma(False)


def spec_from_xla(x: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh) -> jax.sharding.PartitionSpec:
    """The axes of a mesh, or of products of them, over which XLA has sharded an array."""
    sharding: Any = x.sharding
    (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(len(x.shape)), mesh)
    return spec


def apart(call: Callable[[], T]) -> T:
    """What a call returns when no mesh is set; contexts are a thread's own."""
    with futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(call).result()


def without_mesh(kind: str | None = None) -> AbstractContextManager[object]:
    """A context in which types carry no sharding; and Pallas, which asks for sizes of tiles, lowers for a TPU kind."""
    device = None if kind is None else _abstract_device(kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def abstract_device(kind: str, cores: int, platform: str = "tpu") -> AbstractContextManager[object]:
    """A context in which kernels are traced for a device that is not there: `pltpu.get_tpu_info()` answers for it."""
    device = _abstract_device(kind, cores, platform)
    mesh = AbstractMesh((1,), ("_",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _abstract_device(kind: str, cores: int, platform: str) -> Any:
    options: dict[str, Any] = {"device_kind": kind, "num_cores": cores}
    if "platform" in inspect.signature(jax.sharding.AbstractDevice).parameters:  # since jax 0.11
        options["platform"] = platform
    return jax.sharding.AbstractDevice(**options)


def host_program(
    exported: export.Exported, module: ir.Module, inputs: Sequence[ShapedArray], outputs: Sequence[ShapedArray]
) -> Callable[..., tuple[Array, ...]]:
    """An exported program with another module in it, for the CPU: a function of arrays shaped like `inputs`.

    What the export knows of shardings it knows argument by argument, in fields that differ between versions of jax.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(exported):
        if "sharding" in field.name and isinstance(getattr(exported, field.name), tuple):
            flat[field.name] = (None,) * len(inputs if field.name.lstrip("_").startswith("in") else outputs)
    return dataclasses.replace(
        exported,
        platforms=("cpu",),
        in_tree=jax.tree.structure((tuple(inputs), {})),
        in_avals=tuple(inputs),
        out_tree=jax.tree.structure(tuple(outputs)),
        out_avals=tuple(outputs),
        ordered_effects=(),
        unordered_effects=(),
        module_kept_var_idx=tuple(range(len(inputs))),
        mlir_module_serialized=stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version()),
        **flat,
    ).call


def exportable(cls: type[T]) -> type[T]:
    """A pytree whose static part is numbers and names, as an argument or result of functions that are serialized."""

    def read(text: bytes) -> object:
        return _tuples(json.loads(text))

    def write(static: object) -> bytes:
        return json.dumps(static).encode()

    register = functools.partial(
        export.register_pytree_node_serialization, serialize_auxdata=write, deserialize_auxdata=read
    )
    return _registered(register, cls)


def exportable_tuple(cls: type[T]) -> type[T]:
    """The same for a NamedTuple."""
    return _registered(export.register_namedtuple_serialization, cls)


def _registered(register: Callable[..., object], cls: type[T]) -> type[T]:
    try:
        register(cls, serialized_name=f"trencadis.{cls.__name__}")
    except ValueError as error:
        if "uplicate" not in str(error):  # the module is loaded again, as in a notebook
            raise
    return cls


def _tuples(x: object) -> object:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def has_own_rules(equation: Any) -> bool:
    """Whether an operation has derivative rules of a user, which the text of a traced function does not tell apart.

    Those of JAX's functions, such as `jax.nn.relu`, are all in its own modules.
    """
    if "custom" not in equation.primitive.name:
        return False
    pending = [equation.params.get(name) for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")]
    seen: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if x is None or id(x) in seen:
            continue
        if isinstance(x, (tuple, list)):
            pending += x
        elif isinstance(x, functools.partial):
            pending += [x.func, *x.args]
        elif isinstance(x, types.FunctionType):
            seen[id(x)] = x.__module__
            pending += [cell.cell_contents for cell in x.__closure__ or ()]
        elif callable(inner := getattr(x, "f", None) or getattr(x, "__wrapped__", None)):
            seen[id(x)] = "jax."
            pending.append(inner)
        elif callable(x):
            seen[id(x)] = type(x).__module__
    return not seen or not all(str(module).startswith("jax.") for module in seen.values())


def transpose_ref(ref: Ref) -> Ref:
    """The transpose of a matrix in a GPU's shared memory."""
    if JAX >= (0, 11):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.transpose_ref(ref, (1, 0))


def for_transposed_store(x: Array) -> Array:
    """Sums in registers, so that they can be stored into the transpose of a matrix in shared memory.

    jax >= 0.11 has an instruction for it, if they are left as they are.
    """
    if JAX >= (0, 11):
        return x
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu.layout_cast(x, mosaic_gpu.Layout.WGMMA_TRANSPOSED)


@functools.cache
def gpu_interpreter() -> Any:
    """The parameters of the GPU interpreter: memory that was not written, or is outside of an array, reads as NaN."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    if JAX < (0, 11):
        _teach_gpu_interpreter()
    return InterpretGPUParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")


def _teach_gpu_interpreter() -> None:
    """What the interpreter of jax < 0.11 does not know and later ones do.

    It has no products of transposed factors, no stores into a transposed reference and no casts of layouts, and it
    compiles a kernel anew for every warpgroup.
    """
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic.interpret.utils import to_range
    from jax._src.pallas.mosaic_gpu.core import layout_cast_p
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], platform="cpu")

    def wgmma(*, token: Value, device_id: Value, thread_id: Value, acc_dtype: DTypeLike, **refs: Any) -> Value:
        memory = gpu_callbacks._get_shared_memory()
        thread = memory.get_global_thread_id(int(device_id), int(thread_id))

        def at(name: str) -> tuple[Any, Any, bool]:
            transforms = gpu_callbacks._remove_noop_transforms(refs[f"{name}_transforms"])
            flip = bool(transforms) and hasattr(transforms[-1], "permutation")
            key = gpu_callbacks.HostAllocationKey.from_array(refs[f"{name}_allocation_key_as_array"])
            return key, to_range(jax.tree.map(int, transforms[:-1] if flip else transforms)), flip

        def read(key: Any, where: Any, flip: bool) -> np.ndarray:
            value: Any = memory.get_buffer_content(key, where, thread)[0]
            return value.T if flip else value

        with np.errstate(all="ignore"):  # what a tile holds beside its group's rows may be anything
            total = read(*at("acc")) + np.matmul(read(*at("a")), read(*at("b")), dtype=acc_dtype)
        memory.store_buffer_content(*at("acc")[:2], total, thread)
        return token

    def transposable(plain: Callable[..., Any]) -> Callable[..., Any]:
        """A load or a store, of a reference whose last transform may be a transposition; copies name all arguments."""

        def transposing(*args: Any, **options: Any) -> Any:
            transforms = gpu_callbacks._remove_noop_transforms(args[5]) if args else ()
            if not (transforms and hasattr(transforms[-1], "permutation")):
                return plain(*args, **options)
            stored = (x if x is None else x.T for x in args[6:])
            token, value = plain(*args[:5], transforms[:-1], *stored, **options)
            return token, value.T

        return transposing

    gpu_callbacks._get, gpu_callbacks._swap = transposable(gpu_callbacks._get), transposable(gpu_callbacks._swap)
    lock = threading.Lock()

    @functools.lru_cache(maxsize=32)
    def compiled(jaxpr: Jaxpr) -> jax.stages.Wrapped:
        return jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))

    def run(jaxpr: Jaxpr, consts: Sequence[ArrayLike], *args: ArrayLike) -> None:
        with lock:
            executable = compiled(jaxpr).trace(consts, *args).lower().compile()
        executable(consts, *args)

    gpu_callbacks.wgmma = wgmma
    thread_map._run_jaxpr = run


def lower_triton_call(
    context: mlir.LoweringRuleContext, operands: Sequence[IrValue], packed: bytes, aliases: dict[int, int]
) -> Sequence[IrValue]:
    """The custom call of jaxlib that runs a compiled Triton kernel; it has another form in jax < 0.11."""
    if JAX >= (0, 11):
        rule: Any = jax.ffi.ffi_lowering("triton_kernel_call_ffi", operand_output_aliases=aliases)
        return rule(context, *operands, opaque=packed)
    config: Any = packed
    rule = jax.ffi.ffi_lowering(
        "triton_kernel_call", api_version=2, backend_config=config, operand_output_aliases=aliases
    )
    return rule(context, *operands)
