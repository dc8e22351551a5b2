"""DiLoCo: training across sites that talk once in a while (Douillard et al., arXiv 2311.08105).

Every peer takes H inner steps on its own data, sends how far it went, gets back the mean of all, and makes one outer
step with it. What is averaged, how and by whom is in separate modules: `round` (messages), `state` (what all peers
share), `codecs` (bytes), `aggregate` (the mean), `outer` (the step), `averager` (the engines' interface), `peer` (the
face for a training loop). All but `peer` and `data` are numpy only.
"""
