"""The form of a configuration, as help and README show it; it is itself a valid one."""

FORM = """\
name: mine               # results go to results/mine
# or input: {sample: smollm2}, {file: qkv.safetensors}, {model: {name: smollm2, layer: 17}}
input: {random: {heads: 8, kv_heads: 2, q_len: 512, head_dim: 64}}
dtype: float32           # or float16, bfloat16, float64
check: 64                # query rows held against the fp64 reference; true: all, false: none
baseline: causal         # the dense attention of the comparison; null: no mask at all
perplexity: false        # true: the input's model also with each row in all its layers
seed: 0                  # of random inputs, and of which query rows are checked
repeats: 5               # timed calls of each row; medians count
rows:                    # the lines of the table: a name each, all else may be left out
  - {name: window, rule: {sliding_window: {size: 64}}}        # a name with its arguments
  - name: own + sinks    # and, or, not; FILE.py:Name beside this file, or my_lab.rules:Name
    rule: {and: [causal, {or: [{"./mine.py:EveryNth": {n: 4}}, attention_sink]}]}
  - name: quest
    rule: causal
    select: {quest: {block: 32, keep: 4, q_block: 32}}        # what is worth seeing
    score: {softcap: {cap: 30.0}}                             # or a list, one after the other
    tile: 32             # also backend, pack, split, cluster, q_offset, fallback: self or {local: n}
"""
