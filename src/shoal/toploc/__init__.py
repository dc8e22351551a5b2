"""TOPLOC: proofs of inference. A commitment of 258 bytes per 32 generated tokens, and how it is checked.

proofs = build_proofs(hidden)                        toploc/build.py
results = verify_proofs(recomputed, proofs)          toploc/verify.py
"""
