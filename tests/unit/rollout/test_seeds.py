"""Random numbers: those of SplitMix64, one stream per sample, and as uniform as they should be."""

import numpy as np

from rl_megatron.rollout.seeds import stream_key, uniforms


def test_numbers_are_those_of_splitmix64():
    # Published outputs for the seeds 0 and 1234567.
    expected = [0xE220A8397B1DCDAF]
    assert uniforms([0], [0]).tolist() == [(x >> 11) * 2.0**-53 for x in expected]
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = uniforms([1234567] * 3, [0, 1, 2])
    assert numbers.tolist() == [(x >> 11) * 2.0**-53 for x in expected]


def test_a_number_depends_on_its_own_key_and_counter_only():
    alone = uniforms([7], [3])[0]
    among = uniforms([2**64 - 1, 7, 0], [0, 3, 2**40])
    assert among[1] == alone
    assert len(set(among.tolist())) == 3


def test_numbers_are_uniform_within_and_across_streams():
    within = uniforms([stream_key(0, 1)] * 20_000, range(20_000))
    across = uniforms([stream_key(0, row) for row in range(20_000)], [0] * 20_000)
    for numbers in (within, across):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi_square = ((counts - 200) ** 2 / 200).sum()
        # 99 degrees of freedom: mean 99, standard deviation 14.
        assert 50 < chi_square < 160
    assert abs(np.corrcoef(within[:-1], within[1:])[0, 1]) < 0.03


def test_keys_tell_all_parts_and_their_order_apart():
    parts = [(0,), (0, 0), (0, 1), (1, 0), (256, 0), (-1, 0), (0, 2**63), (2**70, 1)]
    keys = [stream_key(*p) for p in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert stream_key(0, 1) == keys[2]
