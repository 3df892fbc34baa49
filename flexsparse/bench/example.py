"""The form of a bench's configuration, as its help shows it; it is itself a valid one."""

EXAMPLE = """\
name: mine               # results go to results/mine
dtype: bfloat16          # or float16, float32
head_dim: 128
baselines: [from_kv_blocks]            # beside the conversion: eager lists, create_block_mask, attn_gym, flashinfer
peers: [flex dense]                    # beside both together: fla, attn_gym, flashinfer
checked: 256             # query rows held against the fp64 reference
rows:                    # one problem each, which may say its tile
  - {name: a, attention: true, blocks: {length: 4096, keep: 8}}           # also q_block, kv_block, tail
  - {name: b, attention: true, nsa: {length: 4096, shared: 2}}            # also block, keep
  - {name: c, attention: true, tokens: {length: 4096, keep: 256}}         # also blocks
  - {name: d, attention: true, decode: {length: 4096, keep: 16}}          # also batch, page
  - {name: e, attention: true, rule: {of: causal, length: 4096}}          # also dense, fresh
  - {name: f, attention: true, ragged: {total: 8192, largest: 4096}}      # also smallest, seed
  - {name: g, ways: all, selector: {of: {quest: {block: 32, keep: 4}}, length: 4096}}
  - {name: h, linear: {length: 4096, keeps: [4, 8, 16]}}                  # time against tiles
  # all take heads, kv_heads and, but for decode and linear, training; rows also backend, pack, peers
"""
