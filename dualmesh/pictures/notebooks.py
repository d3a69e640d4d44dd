"""What notebooks show for a spec, a topology and a state.

Pictures and tables come from `picture`.
"""

from html import escape
from typing import TYPE_CHECKING

from dualmesh.pictures.axis_facts import GPUS_PER_NODE
from dualmesh.pictures.picture import Picture, axes_table, html_table
from dualmesh.topology.topology import Topology

if TYPE_CHECKING:
    from dualmesh.backend.state import ParallelState
    from dualmesh.topology.spec import TopologySpec


def topology_html(topology: Topology, name: str = "topology") -> str:
    """Return a topology's picture and the table of its axes. *Pure.*"""
    table = axes_table(topology, GPUS_PER_NODE)
    return f"<div>\n{Picture({name: topology}).svg}<details><summary>axes</summary>\n{table}\n</details>\n</div>"


def spec_html(spec: "TopologySpec") -> str:
    """Return the declarations of a spec as a table; sizes to infer are shown as such. *Pure.*"""
    rows = [("axis", name, _size(size)) for name, size in spec.axes.items()]
    for name, view in spec.views.items():
        over = " x ".join(view.over)
        rows += [(f"view {name} over {over}", axis, _size(size)) for axis, size in view.axes.items()]
    rows += [("combined", name, " x ".join(axes)) for name, axes in spec.combined.items()]
    rows += [("role", name, " x ".join(axes)) for name, axes in spec.roles.items()]
    if spec.rank_offset:
        rows.append(("first rank", "", str(spec.rank_offset)))
    return f"<div>\n<b>TopologySpec</b>\n{html_table(('kind', 'name', 'value'), rows)}\n</div>"


def state_html(state: "ParallelState") -> str:
    """Return what a state is, then its topology. *Pure.*"""
    names = ", ".join(state.names) or "no name"
    ranks = ", ".join(map(str, state.local_ranks[:8])) + (" .." if state.local_ranks[8:] else "")
    life = "live" if state.is_live else "ended"
    text = f"{names}: {state.backend} on {state.device_type}, {life}, rank of this process: {ranks or 'none'}"
    return f"<div>\n<p>{escape(text)}</p>\n{topology_html(state.topology, names)}\n</div>"


def _size(size: object) -> str:
    return "inferred" if size == -1 else str(size)
