"""All messages on the wire, in both directions, as typed classes.

Invariants:
- a message has exactly the fields defined here; numbers are integers, texts and lists have a maximum length;
- what someone signs for the ledger (a manifest, verdict, version, command or appeal) is a message with a detached
  signature of its canonical JSON: `sign_message` creates the signature, `open_message` checks it;
- an important answer comes with a document signed by the coordinator, for the caller to keep.

Changing breaks: nodes of a different version, and, for signed messages, the signatures in every ledger.
"""

from shoal.protocol.messages.base import *
from shoal.protocol.messages.membership import *
from shoal.protocol.messages.public import *
from shoal.protocol.messages.signing import *
from shoal.protocol.messages.validation import *
from shoal.protocol.messages.work import *
