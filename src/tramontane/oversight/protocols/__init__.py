"""The protocols of scalable oversight (arXiv 2407.04622), one file each.

A protocol is a function from an `Episode` to its moves. A new one is a file of a few lines and an
entry here.
"""

from collections.abc import Callable

from tramontane.oversight.episode import Episode, Moves
from tramontane.oversight.protocols.consultancy import consultancy
from tramontane.oversight.protocols.debate import debate
from tramontane.oversight.protocols.direct import direct, direct_article
from tramontane.oversight.protocols.open_consultancy import open_consultancy
from tramontane.oversight.protocols.open_debate import open_debate

PROTOCOLS: dict[str, Callable[[Episode], Moves]] = {
    protocol.__name__: protocol
    for protocol in (direct, direct_article, consultancy, debate, open_consultancy, open_debate)
}
