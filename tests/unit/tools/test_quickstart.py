import pytest

from tools.quickstart import split_settings


@pytest.mark.parametrize(
    ("arguments", "settings", "ranks"),
    [
        ([], [], 1),
        (["ranks=2"], [], 2),
        (["seed=1", "backend=torch"], ["seed=1", "backend=torch"], 1),
        (
            ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"],
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.pipeline_model_parallel_size=2",
            ],
            4,
        ),
        # Two copies of the model, each on two ranks.
        (
            ["tensor_model_parallel_size=2", "ranks=4", "sequence_parallel=true"],
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            4,
        ),
    ],
)
def test_layouts_start_the_ranks_they_need(arguments, settings, ranks):
    assert split_settings(arguments) == (settings, ranks)


def test_a_word_that_is_no_setting_stops_it():
    with pytest.raises(SystemExit, match="fast is no setting=value; see --help"):
        split_settings(["fast"])
    with pytest.raises(SystemExit, match="learns addition by SFT"):
        split_settings(["--help"])
