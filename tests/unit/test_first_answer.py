"""Whether a start of vLLM that fails is tried again."""

import pytest

from node.engines.vllm.server import ServerFailed, ServerRefused
from node.hosting.engine_hosts import first_answer_counts
from swarm.errors import ChildFailed, ConfigError


def test_what_vllm_refuses_before_it_served_is_final():
    with (
        pytest.raises(ConfigError, match=r"--engine vllm: no such head; .*--engine torch"),
        first_answer_counts(has_served=False),
    ):
        raise ServerRefused("no such head")


@pytest.mark.parametrize(
    ("error", "has_served"),
    [(ServerRefused("no room just now"), True), (ServerFailed("was killed"), False)],
)
def test_what_may_pass_is_tried_again(error: ChildFailed, has_served: bool):
    with pytest.raises(type(error)) as raised, first_answer_counts(has_served=has_served):
        raise error
    assert raised.value is error
