"""One peer of the distribution benchmark that runs libtorrent, in the environment of `_distribution_environment`.

`python -m benchmarks._distribution_torrent ADDRESS STYLE`. Peers are named to each other, as a tracker would.
"""

import sys
import time
from typing import Any

# pyright: reportMissingImports=false
import libtorrent as lt

from benchmarks._distribution_lines import Lines, Marks, flush, leave

PORT = 6881
LOOK_S = 0.05
QUIET: dict[str, Any] = {"enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False}
TCP_ONLY: dict[str, Any] = {"enable_outgoing_utp": False, "enable_incoming_utp": False}
SHALLOW: dict[str, Any] = {
    # A request that waits in a queue is a decision made too early: what is rarest then need not be so now.
    "max_out_request_queue": 8,
    "request_queue_time": 1,
    "send_buffer_watermark": 16_384,
    "send_buffer_low_watermark": 1,
    "send_buffer_watermark_factor": 1,
    "send_socket_buffer_size": 65_536,
    "recv_socket_buffer_size": 131_072,
    "unchoke_slots_limit": -1,
    "initial_picker_threshold": 0,
}
STYLES: dict[str, dict[str, Any]] = {"defaults": QUIET, "tcp": QUIET | TCP_ONLY, "tuned": QUIET | TCP_ONLY | SHALLOW}
TUNED_PIECE_BYTES = 16_384


class Peer:
    """One libtorrent session."""

    def __init__(self, lines: Lines, address: str, style: str) -> None:
        self._lines = lines
        self._style = style
        category = lt.alert.category_t
        self._session = lt.session(
            {
                **STYLES[style],
                "listen_interfaces": f"{address}:{PORT}",
                "alert_mask": category.storage_notification | category.error_notification,
            }
        )
        lines.say("ready", version=lt.__version__)

    def make(self, path: str, torrent: str) -> None:
        """Describe a file."""
        tuned = self._style == "tuned"
        size = TUNED_PIECE_BYTES if tuned else 0
        storage = lt.file_storage()
        lt.add_files(storage, path)
        flags = lt.create_torrent.v1_only if tuned else 0
        creator = lt.create_torrent(storage, size, flags)
        lt.set_piece_hashes(creator, path.rpartition("/")[0])
        with open(torrent, "wb") as file:
            file.write(lt.bencode(creator.generate()))
        self._lines.say("made", piece_bytes=lt.torrent_info(torrent).piece_length())

    def add(self, torrent: str, folder: str, peers: list[str], *, seed: bool) -> None:
        """Take part; a peer that is no seed says when it has everything."""
        parameters = lt.add_torrent_params()
        parameters.ti = lt.torrent_info(torrent)
        parameters.save_path = folder
        flags = lt.torrent_flags
        parameters.flags = (flags.seed_mode if seed else flags.update_subscribe) & ~flags.auto_managed & ~flags.paused
        handle = self._session.add_torrent(parameters)
        self._lines.say("added")
        for peer in peers:
            handle.connect_peer((peer, PORT))
        if not seed:
            self._follow(handle, f"{folder}/{parameters.ti.name()}")

    def _follow(self, handle: Any, path: str) -> None:
        marks = Marks(self._lines)
        while not (status := handle.status()).is_seeding:
            marks.reached(status.total_wanted_done / max(1, status.total_wanted))
            time.sleep(LOOK_S)
        handle.flush_cache()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            self._session.wait_for_alert(100)
            if any(isinstance(alert, lt.cache_flushed_alert) for alert in self._session.pop_alerts()):
                break
        flush(path)
        marks.reached(1.0)
        status = handle.status()
        self._lines.say(
            "whole",
            wasted_bytes=status.total_redundant_bytes + status.total_failed_bytes,
            downloaded_bytes=status.total_payload_download,
            peers=status.num_peers,
        )


def main() -> None:
    """Do as told."""
    lines = Lines()
    peer = Peer(lines, sys.argv[1], sys.argv[2])
    for order in lines.orders():
        if order["do"] == "make":
            peer.make(order["path"], order["torrent"])
        else:
            peer.add(order["torrent"], order["folder"], order["peers"], seed=order["seed"])
    leave()


if __name__ == "__main__":
    main()
