"""swarm-coordinator says what it is, and that there is nothing to run yet."""

import pytest

from coordinator.cli import NOT_YET, main


def test_no_planning_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == NOT_YET + "\n"


@pytest.mark.parametrize(
    ("flag", "said"), [("--version", "swarm-coordinator "), ("--help", "usage")]
)
def test_flags(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert said in capsys.readouterr().out
