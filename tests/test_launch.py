"""The launcher remembers compiled kernels at least as finely as Triton specialises them."""

import fractions
import itertools

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels import launch
from tilewise.kernels.launch import Descriptors, Launcher, _kind


class Compiled:
    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args: self.log.append(("direct", grid, args))


class Kernel:
    """What a launcher uses of a compiled kernel's function."""

    arg_names = ("x", "n", "A", "B")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def call(*args, **kwargs):
            self.log.append(("bound", grid, args, kwargs))
            return Compiled(self.log)

        return call


@pytest.fixture
def launcher(monkeypatch):
    class Active:
        device = 0

        @classmethod
        def get_current_device(cls):
            return cls.device

    monkeypatch.setattr(triton.runtime.driver, "_active", Active, raising=False)
    made = Launcher(Kernel())
    made._interpreted = False
    made.active = Active
    made.kernel.arg_names = list(Kernel.arg_names)
    return made


def test_the_second_call_goes_straight_to_the_compiled_kernel(launcher):
    x, y = torch.zeros(4), torch.zeros(8)
    launcher((1, 2, 1), (x, 5), {"A": 1, "B": None}, num_warps=4)
    launcher((3, 1, 1), (y, 6), {"A": 1, "B": None}, num_warps=4)
    bound, direct = launcher.kernel.log
    assert bound == ("bound", (1, 2, 1), (x, 5), {"A": 1, "B": None, "num_warps": 4})
    assert direct[:2] == ("direct", (3, 1, 1))
    assert direct[2][0] is y
    assert direct[2][1:] == (6, 1, None)


@pytest.mark.parametrize(
    ("args", "constants", "options"),
    [
        ((torch.zeros(4, dtype=torch.float16), 5), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((torch.zeros(5)[1:], 5), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((torch.zeros(4), 16), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((torch.zeros(4), 1), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((torch.zeros(4), 2**31), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((None, 5), {"A": 1, "B": 2}, {"num_warps": 4}),
        ((torch.zeros(4), 5), {"A": 2, "B": 1}, {"num_warps": 4}),
        ((torch.zeros(4), 5), {"A": 1, "B": 2}, {"num_warps": 8}),
    ],
)
def test_calls_of_another_kind_are_bound_anew(launcher, args, constants, options):
    launcher((1, 1, 1), (torch.zeros(4), 5), {"A": 1, "B": 2}, num_warps=4)
    launcher((1, 1, 1), args, constants, **options)
    assert [entry[0] for entry in launcher.kernel.log] == ["bound", "bound"]


def test_another_device_has_its_own_kernels(launcher):
    args = (torch.zeros(4), 5), {"A": 1, "B": 2}
    launcher((1, 1, 1), *args)
    launcher.active.device = 1
    launcher((1, 1, 1), *args)
    assert [entry[0] for entry in launcher.kernel.log] == ["bound", "bound"]


def test_constants_must_follow_the_signature(launcher):
    with pytest.raises(TypeError, match=r"\['B', 'A'\].*\['A', 'B'\]"):
        launcher((1, 1, 1), (torch.zeros(4), 5), {"B": 1, "A": 2})


def test_memory_is_bounded(launcher, monkeypatch):
    monkeypatch.setattr(launch, "MAX_REMEMBERED", 3)
    for a in range(10):
        launcher((1, 1, 1), (torch.zeros(4), 5), {"A": a, "B": 2})
        assert len(launcher._compiled) <= 3


def arguments():
    yield from (
        0,
        1,
        2,
        -1,
        15,
        16,
        17,
        48,
        2**31 - 16,
        2**31 - 1,
        2**31,
        2**40,
        -(2**31),
        0.5,
        None,
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64):
        buffer = torch.zeros(64, dtype=dtype)
        yield from (buffer, buffer[1:], buffer[16:])
        if dtype.itemsize == 2:
            x = buffer.view(2, 32)
            yield from (TensorDescriptor.from_tensor(x, block) for block in ([1, 8], [2, 16]))


def test_a_kind_is_at_least_as_fine_as_tritons_specialisation():
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    seen = 0
    for a, b in itertools.combinations(arguments(), 2):
        theirs = [native_specialize_impl(backend, x, False, True, True) for x in (a, b)]
        if theirs[0] != theirs[1]:
            seen += 1
            assert _kind(a) != _kind(b), (a, b)
    assert seen > 100


def test_descriptors_are_like_those_made_singly():
    made = []

    def make(x, shape, strides, block):
        made.append(x)
        return TensorDescriptor(x, shape, strides, block)

    describe = Descriptors(make)
    memory = torch.zeros(40, 4, 64, 64)
    views = [memory[:n] for n in (40, 7, 7, 1)] + [memory[:, :, :16], memory.transpose(1, 2)]
    for x in views:
        ours, theirs = describe(x, (1, 1, 16, 64)), TensorDescriptor.from_tensor(x, [1, 1, 16, 64])
        assert ours.base is x
        assert ours.shape == list(theirs.shape)
        assert ours.block_shape == theirs.block_shape
        if x.shape[0] > 1:
            assert ours.strides == list(theirs.strides)
        assert _kind(ours) == _kind(theirs)
    assert len(made) == 4
    assert all(template.base is None for template in describe._templates.values())


def test_singleton_axes_may_have_any_stride():
    x = torch.zeros(64).as_strided((1, 1, 2, 16), (3, 5, 16, 1))
    describe = Descriptors(lambda *args: TensorDescriptor(*args))
    assert describe(x, (1, 1, 2, 16)).strides == [16, 16, 16, 1]
    with pytest.raises(AssertionError, match="16-byte aligned"):
        describe(torch.zeros(64).as_strided((2, 1, 2, 16), (3, 5, 16, 1)), (1, 1, 2, 16))


def test_other_arguments_are_named():
    with pytest.raises(TypeError, match="Fraction"):
        _kind(fractions.Fraction(1, 2))
