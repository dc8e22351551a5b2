"""DiLoCo: training across sites that communicate only occasionally (Douillard et al., arXiv 2311.08105).

Every peer takes H inner steps on its own data, sends its weight difference, gets back the mean of all, and makes one
outer step with it. The parts are separate modules: `round` (messages, and the interface of every averager), `state`
(what all peers share), `codecs` (bytes), `aggregate` (the mean), `outer` (the step), `peer` (the interface for a
training loop). All but `peer` and `data` need only numpy.
"""
