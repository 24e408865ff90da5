from rl_megatron.metrics.timing import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_and_tokens_of_each_phase_add_up_over_its_spans() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for seconds, tokens in ((2.0, 30), (3.0, 20)):
        with timer.phase("update") as span:
            clock.now += seconds
            span.tokens = tokens
    with timer.phase("score"):
        clock.now += 0.5
    clock.now += 0.25  # between the phases
    assert timer.collect() == {
        "time/step_seconds": 5.75,
        "time/update_seconds": 5.0,
        "time/update_tokens_per_second": 10.0,  # 50 tokens in 5 seconds
        "time/score_seconds": 0.5,
    }


def test_collecting_starts_over() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("generate"):
        clock.now += 1.0
    timer.collect()
    clock.now += 4.0
    assert timer.collect() == {"time/step_seconds": 4.0}


def test_phases_may_stand_inside_each_other() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("evaluate"):
        clock.now += 1.0
        with timer.phase("generate"):
            clock.now += 2.0
    metrics = timer.collect()
    assert metrics["time/evaluate_seconds"] == 3.0
    assert metrics["time/generate_seconds"] == 2.0
