"""mlx-lm 0.32.2: text before a stop string is lost where it begins like the stop string. Runs in the environment of mlx-lm.

.peers/mlx/bin/python benchmarks/server_faults/mlx_stop.py
"""

from mlx_lm.generate import TextStateMachine

machine = TextStateMachine({"normal": [("abc", "normal")]})  # as make_text_state_machine builds it for "stop": ["abc"]
state, text = machine.make_state(), ""
for piece in ("x", "a", "a", "b"):  # the server does not decode the last token of a stop sequence, here "c"
    state, part, _ = machine.step(state, piece)
    text += part
machine.discard(state)  # finish_reason is "stop"
print(f"before the stop string 'abc' in 'xaabc': {text!r}")
