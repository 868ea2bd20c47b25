"""A child that answers as it is asked to: `python -m tests.unit.channel_child`."""

import sys

from node.system.child_process import FRAME_BYTES_MAX, HEADER, NUMBER, decode, encode


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(HEADER.size):
        request = decode(requests.read(HEADER.unpack(header)[0]))
        frame = encode({NUMBER: request[NUMBER], "ok": request["text"]})
        bad = {
            "large": HEADER.pack(FRAME_BYTES_MAX + 1),
            "noise": HEADER.pack(3) + b"\xc1\xc1\xc1",
            "list": HEADER.pack(1) + b"\x90",
            "nameless": encode({"ok": 1}),
            "late": encode({NUMBER: request[NUMBER] - 1, "ok": "old"}) + frame,
            "half": frame[:-1],
        }
        answers.write(bad.get(request["how"], frame))
        answers.flush()
        if request["how"] == "half":
            return


if __name__ == "__main__":
    main()
