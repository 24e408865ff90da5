"""Memory given back and filled again in place: views stay views."""

import torch

from rl_megatron.backends.offload import Offloaded


def test_views_of_one_buffer_come_back_as_views():
    buffer = torch.arange(12.0)
    matrix, tail, alone = buffer[:6].view(2, 3), buffer[8:], torch.tensor([1, 2], dtype=torch.int16)
    places = [buffer.untyped_storage()._cdata, alone.untyped_storage()._cdata]
    kept = Offloaded()
    kept.take([matrix, tail, alone, matrix])
    assert buffer.untyped_storage().nbytes() == 0
    assert alone.untyped_storage().nbytes() == 0
    kept.restore()
    assert buffer.tolist() == list(range(12))
    assert alone.tolist() == [1, 2]
    assert places == [buffer.untyped_storage()._cdata, alone.untyped_storage()._cdata]
    tail.fill_(-1)
    matrix[1, 2] = 50
    assert buffer.tolist() == [0, 1, 2, 3, 4, 50, 6, 7, -1, -1, -1, -1]


def test_taking_twice_and_restoring_twice_lose_nothing():
    first, second = torch.ones(3), torch.full((2,), 2.0)
    kept = Offloaded()
    kept.take([first])
    kept.take([first, second])
    kept.restore()
    kept.restore()
    assert first.tolist() == [1, 1, 1]
    assert second.tolist() == [2, 2]


def test_nan_and_empty_tensors_survive():
    value, empty = torch.tensor([torch.nan, -0.0]), torch.empty(0)
    bits = value.view(torch.int32).clone()
    kept = Offloaded()
    kept.take([value, empty])
    kept.restore()
    assert torch.equal(value.view(torch.int32), bits)
    assert empty.shape == (0,)


def test_an_optimizer_goes_on_as_if_nothing_had_happened():
    outcomes = []
    for moves in (False, True):
        buffer = torch.linspace(-1, 1, 6)
        parameter = torch.nn.Parameter(buffer[:4].view(2, 2))
        adam = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = parameter.detach().sin()
            adam.step()
            if moves:
                kept = Offloaded()
                kept.take([parameter, *adam.state[parameter].values()])
                kept.restore()
        outcomes.append(buffer.clone())
    assert torch.equal(*outcomes)
