"""Run a teacher graph in onnxruntime, on the requested execution provider and no other, and on threads."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

from shd_ref.cache.storage.documents import MAX_INTEGER
from shd_ref.errors import ShdError, graph_invalid, import_package, need
from shd_ref.teacher.opening.model import Weights, data_folder, find_taken, onnx, put_back
from shd_ref.teacher.options import RunOptions

PROVIDERS: Final[dict[str, str]] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Short names of the execution providers; the long ones are accepted too."""


def provider_name(provider: str) -> str:
    return PROVIDERS.get(provider, provider)


def is_cpu(provider: str) -> bool:
    """Whether a run is on the CPU, by either name."""
    return provider_name(provider) == PROVIDERS["cpu"]


_NEEDED: Final = "running a teacher needs onnxruntime: pip install '.[teacher]' (in a checkout)"

MAX_THREADS: Final = 1024
"""Of one session: onnxruntime starts any number it is given, even far more than there are cores."""


def check_session(provider: str, num_threads: int | None = None) -> str:
    """Refuse options that no session can have, before there is a model; onnxruntime's name of the provider."""
    onnxruntime = import_package("onnxruntime", _NEEDED)
    name = provider_name(provider)
    if name not in onnxruntime.get_available_providers():
        raise ShdError("provider-unavailable", _remedy(name, onnxruntime.get_available_providers()))
    _check_range("num_threads", num_threads, 1, MAX_THREADS)
    return name


def _check_range(
    name: str, number: int | None, least: int, most: int = MAX_INTEGER, spec_id: str | None = None
) -> None:
    fits = number is None or least <= number <= most
    need(fits, "argument-value", name, f"be {least} to {most}", number, spec_id=spec_id)


def check_run(run: RunOptions) -> None:
    """Refuse options that no run can have, before a teacher is loaded or a sample read."""
    for name, least in {"batch_size": 1, "batch_tokens": 1, "samples_per_shard": 1, "tile": 0}.items():
        _check_range(name, getattr(run, name), least)
    _check_range("seed", run.seed, 0, spec_id="CACHE-12")
    check_session(run.provider, run.num_threads)


def open_session(
    model: onnx.ModelProto | bytes | str | Path,
    *,
    provider: str = "CPUExecutionProvider",
    num_threads: int | None = None,
    weights: Weights | None = None,
    most_bytes: int | None = None,
    keeps_memory: bool = True,
) -> Any:
    """An ``onnxruntime.InferenceSession`` on exactly this provider: a fall-back to the CPU is an error here.

    Args:
        model: from ``load_teacher`` or made of such a one, serialised, or the path of one.
        provider: ``"cpu"``, ``"cuda"``, or onnxruntime's name of an execution provider.
        num_threads: threads inside one operator, 1 to ``MAX_THREADS``; default: onnxruntime's choice.
        weights: those that the model lacks, from ``take_weights``; sessions of one teacher share them.
        most_bytes: memory that its tensors may take on the CPU, in opening it and in each run; default: all there is.
        keeps_memory: of the host, from run to run: quicker, and as much as its largest run took.

    Raises:
        ShdError: ``provider-unavailable``, ``argument-value``, ``dependency-missing``, ``graph-invalid``.
    """
    name = check_session(provider, num_threads)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, not logged
    options.enable_cpu_mem_arena = keeps_memory
    if num_threads is not None:
        options.intra_op_num_threads = num_threads
    if name == PROVIDERS["cuda"]:
        # Finds the CUDA and cuDNN of the nvidia-* wheels, where the system has none.
        # (Not session.disable_cpu_ep_fallback: it also forbids what onnxruntime keeps on the CPU on purpose, the
        # arithmetic on shapes, so no transformer would load.)
        with redirect_stdout(None):  # the error below names the missing part
            onnxruntime.preload_dlls()
    if name != PROVIDERS["cpu"]:
        # Of a provider that cannot be loaded, onnxruntime's own log repeats the error in ten lines.
        onnxruntime.set_default_logger_severity(4)
    more: dict[str, Any] = {}
    if most_bytes is not None:
        # The process has one such memory; only these sessions use it, and each keeps the one that it was opened with.
        arena, kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
        bounds = onnxruntime.OrtArenaCfg({"max_mem": most_bytes, "arena_extend_strategy": 1})
        onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", arena, 0, kind), bounds)
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Tensors of constants are then computed in a run, within its bounds, and not before it.
        more["disabled_optimizers"] = ["ConstantFolding"]
    lent: dict[str, Any] = {}
    if isinstance(model, str | Path):
        source: bytes | str = str(model)
    elif isinstance(model, bytes):
        source = model
    else:
        if weights and name != PROVIDERS["cpu"]:  # the arrays are in host memory
            model, weights = put_back(model, weights), None
        lent = {
            tensor: onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for tensor, array in find_taken(model, weights or {}).items()
        }
        options.add_external_initializers(list(lent), list(lent.values()))
        source = model.SerializeToString()
        folder = data_folder(model)
        if folder is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    try:
        session = onnxruntime.InferenceSession(source, options, providers=[name], enable_fallback=False, **more)
    except Exception as error:  # onnxruntime's errors share no base class but Exception
        if name != PROVIDERS["cpu"]:
            raise ShdError("provider-unavailable", f"{_remedy(name, [])} ({error})") from error
        raise graph_invalid(f"onnxruntime rejects the teacher graph: {error}: copy or export it again") from error
    finally:
        if name != PROVIDERS["cpu"]:
            onnxruntime.set_default_logger_severity(2)  # its default
    if session.get_providers()[0] != name:
        raise ShdError("provider-unavailable", _remedy(name, session.get_providers()))
    session.shd_lent = lent  # onnxruntime reads these buffers in place, and does not keep them alive
    return session


def describe_session() -> str:
    """The version and options of ``open_session`` that decide how a quantised graph rounds (CACHE-27)."""
    return f"onnxruntime {import_package('onnxruntime', _NEEDED).__version__}, all optimisations"


def run_bounded(
    session: Any, names: Sequence[str], feeds: Mapping[str, NDArray[Any]], seconds: float
) -> list[NDArray[Any]]:
    """Some outputs of a session, from ``open_session``, that gives its memory back after the run."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    timer = threading.Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        outputs: list[NDArray[Any]] = session.run(list(names), dict(feeds), options)
    except Exception as error:  # onnxruntime's errors share no base class but Exception
        if options.terminate:
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    return outputs


def _remedy(name: str, got: list[str]) -> str:
    message = f"provider must be available; asked for {name}" + (f", got {', '.join(got)}" if got else "")
    if name == PROVIDERS["cuda"]:
        return (
            f"{message}: install onnxruntime-gpu with the CUDA and cuDNN it was built for "
            "(pip install 'onnxruntime-gpu[cuda,cudnn]'), or take --provider cpu"
        )
    return f"{message}: install an onnxruntime built with it, or take --provider cpu"


T = TypeVar("T")
R = TypeVar("R")

SMALL_PRODUCT: Final = 2**27
"""Multiplications of a product that is not worth threads: hundredths of a second on one core. Threads of BLAS
wait for each other on these: on a busy machine of two cores they took the start of a run from 4 to 16 seconds."""


def threads_for(multiplications: int) -> AbstractContextManager[object]:
    """One thread for small products, after which BLAS threads would wait for each other on a busy machine."""
    if multiplications > SMALL_PRODUCT:
        return nullcontext()
    import threadpoolctl

    limits: AbstractContextManager[object] = threadpoolctl.threadpool_limits(1, user_api="blas")
    return limits


def share_threads(num_threads: int | None, *, on_cpu: bool) -> tuple[int, int | None]:
    """How many batches run at once (0: on the caller's thread), and threads of a session (None: its choice)."""
    threads = count_cores() if num_threads is None and on_cpu else num_threads
    if threads == 1:
        return 0, 1
    # The second caller runs next to the session's threads, which include the first.
    return 2, threads - 1 if on_cpu and threads is not None else threads


def count_cores() -> int:
    """Physical cores that this process may use, as far as the system knows; hyperthreads gain a session nothing."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or usable, usable)


def run_in_background(work: Callable[[], T], callers: int, *, daemon: bool = False) -> Callable[[], T]:
    """Begin a piece of work (without callers, at the first request); the function returned waits for its result."""
    if not callers:
        return functools.cache(work)
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is requested
            future.set_exception(error)

    threading.Thread(target=run, daemon=daemon).start()
    return future.result


def run_ahead(run: Callable[[T], R], items: Iterable[T], callers: int) -> Generator[tuple[T, R], None, None]:
    """Results in the order of the items, computed while earlier ones are handled; errors come in their turn."""
    if not callers:
        for item in items:
            yield item, run(item)
        return
    under_way: deque[tuple[T, Future[R]]] = deque()

    def take() -> tuple[T, R]:  # so that nothing here keeps the results
        item, future = under_way.popleft()
        return item, future.result()

    remaining, failure = iter(items), None
    with ThreadPoolExecutor(callers, thread_name_prefix="shd-batch") as pool:
        try:
            while True:
                try:
                    item = next(remaining)
                except StopIteration:
                    break
                except Exception as error:  # raised below, after the work under way
                    failure = error
                    break
                under_way.append((item, pool.submit(run, item)))
                if len(under_way) > callers:
                    yield take()
            while under_way:
                yield take()
            if failure is not None:
                raise failure
        finally:  # an error, or the consumer stopped early
            for _, future in under_way:
                future.cancel()
