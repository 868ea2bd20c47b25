"""A node's rounds in TensorBoard, Weights & Biases (offline) and trackio, by their own readers."""

import json
import subprocess
from math import isnan
from pathlib import Path

import pytest

from tests import extra_env
from tests.integration.nodes import ENVIRON, MakeNode, NodeProcess

pytestmark = [pytest.mark.integration, pytest.mark.trackers, pytest.mark.slow]

# Each prints {metric: [[step, value], ...]} of what the tracker has.
TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]); found.Reload()
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util import tensor_util
(told,) = found.PluginTagToContent("hparams").values()
told = HParamsPluginData.FromString(told).session_start_info.hparams
print(json.dumps({name: getattr(value, value.WhichOneof("kind")) for name, value in told.items()}))
print(json.dumps({
    tag: [[e.step, float(tensor_util.make_ndarray(e.tensor_proto))] for e in found.Tensors(tag)]
    for tag in found.Tags()["tensors"] if not tag.startswith("_")
}))
"""
# Its file is a log as LevelDB's: after a head of 7 bytes blocks of 32 KiB, and in them pieces of
# records, each with a checksum, its length and whether it is whole or which part of a record.
WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
(file,) = Path(sys.argv[1]).rglob("*.wandb")
data, at, piece, found, settings = file.read_bytes(), 7, b"", {}, {}
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    piece += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
        record = Record(); record.ParseFromString(piece)
        piece = b""
        settings |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        told = {".".join(i.nested_key) or i.key: json.loads(i.value_json)
                for i in record.history.item}
        for name, value in told.items():
            found.setdefault(name, []).append([told["round"], value])
print(json.dumps(settings))
print(json.dumps(found))
"""
TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("swarm-node")
print(json.dumps(SQLiteStorage.get_run_config("swarm-node", run)))
found = {}
for row in SQLiteStorage.get_logs("swarm-node", run):
    for name, value in row.items():
        if isinstance(value, (int, float)):
            found.setdefault(name, []).append([row["step"], value])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("kind", "reader"), [("tensorboard", TENSORBOARD), ("wandb", WANDB), ("trackio", TRACKIO)]
)
def test_rounds_and_evaluations_are_there_by_their_metrics_names(
    kind: str, reader: str, make_node: MakeNode, tmp_path: Path
) -> None:
    node: NodeProcess = make_node("alone", "--report-to", kind, "--evaluate-every", "2")
    python = str(extra_env.find("trackers"))
    node.python = python
    home = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    node.environ = home
    node.start()
    node.until(lambda: node.last_round() >= 3 and node.rounds()[-1].trained_tokens_total > 0)
    assert node.interrupt() == 0
    done = subprocess.run(
        [python, "-c", reader, str(node.data_dir / "tracking" / kind)],
        capture_output=True, text=True, check=True, env=ENVIRON | home,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    rounds = node.rounds()
    assert [step for step, _ in found["own_reward"]] == [each.round for each in rounds]
    assert [value for _, value in found["own_reward"]] == pytest.approx(
        [each.own_reward for each in rounds]
    )
    assert [step for step, _ in found["held_out_ratio"]][:2] == [0, 2]
    assert found["trained_tokens_total"][-1][1] == rounds[-1].trained_tokens_total
    for name, field in (("entropy_nats", "own_logprob"), ("learning_rate", "step_rate")):
        values = [
            (each.round, getattr(each, field)) for each in rounds
        ]  # none: nothing to train on
        known = [number for number, value in values if value is not None and not isnan(value)]
        assert known, name
        assert [step for step, _ in found[name]] == known, name
    for name in ("loss", "grad_norm", "completion_mean_tokens"):
        assert len(found[name]) == len(rounds), name
    settings = json.loads(done.stdout.splitlines()[-2])
    assert (settings["loss"], settings["advantage"], settings["group_size"]) == ("sapo", "grpo", 4)
