"""Ragged entries in pages: sequences of different lengths that grow without moving what is there.

A *sequence* is one row and one group of KV heads: what closes chunks together. Its entries lie in pages, and
its block table says in which. Reordering and repeating rows copy tables, not entries; a page that two
sequences share is copied when one of them writes to it. A few queries are multiplied with the pages where they
lie; many are worth gathering entries for.

Legend: B rows, G groups, K KV heads, J = K / G heads of a group, E entries, P entries of a page, N pages, M pages
of the longest sequence, H head width, R queries of a KV head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["PagedEntries"]


class _Owners(NamedTuple):
    """Whose pages are whose, for products over all pages at once.

    Attributes:
        sequence_N: of each page, counted over rows and groups; free pages belong to one more, which nobody reads.
        asking_N: the same, but of free pages the first: what their products are does not matter.
        place_N: of each page among all places of the tables.
    """

    sequence_N: torch.Tensor
    asking_N: torch.Tensor
    place_N: torch.Tensor


class PagedEntries:
    """Keys and values of closed entries.

    Args:
        page_entries: P, entries of one page.
    """

    def __init__(self, page_entries: int = 16) -> None:
        self.page_entries = page_entries
        self._slabs: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values, each [N, J, P, H]
        self._free: list[int] = []
        self._shared = False  # whether two sequences may name one page
        self._table_BGM = torch.empty(0, 0, 0, dtype=torch.long)
        self.counts_BG = torch.empty(0, 0, dtype=torch.long)
        self.longest = 0  # entries of the longest sequence
        self._owners: _Owners | None = None  # found again when tables have changed

    @property
    def shared(self) -> bool:
        """Whether two sequences may name one page, as beams do."""
        return self._shared

    @property
    def pages(self) -> int:
        """Pages in use."""
        return sum(len(keys) for keys, _ in self._slabs) - len(self._free)

    def append(self, keys_BKEH: torch.Tensor, values_BKEH: torch.Tensor, filled_BGE: torch.Tensor) -> None:
        """Add entries behind those of each sequence.

        Args:
            keys_BKEH: keys of new entries, padded at the end of each sequence.
            values_BKEH: their values.
            filled_BGE: bool, which are no padding, [B or 1, G, E].
        """
        rows, heads = keys_BKEH.shape[:2]
        groups, new = filled_BGE.shape[1:]
        filled_BGE = filled_BGE.expand(rows, groups, new)
        if not self.counts_BG.numel():
            self.counts_BG = torch.zeros(rows, groups, dtype=torch.long, device=keys_BKEH.device)
            self._table_BGM = self.counts_BG.new_zeros(rows, groups, 0)
            empty = keys_BKEH.new_zeros(0, heads // groups, self.page_entries, keys_BKEH.shape[3])
            self._slabs = [(empty, empty)]
        if not new or not bool(filled_BGE.any()):  # most steps of decoding
            return
        after_BG = self.counts_BG + filled_BGE.sum(dim=-1)
        self._own_last_pages()
        self._reserve(after_BG)
        row_N, group_N, entry_N = filled_BGE.nonzero(as_tuple=True)
        place_N = self.counts_BG[row_N, group_N] + entry_N
        page_N = self._table_BGM[row_N, group_N, place_N // self.page_entries]
        slot_N = place_N % self.page_entries
        for states, part in ((keys_BKEH, 0), (values_BKEH, 1)):
            by_group = states.detach().view(rows, groups, heads // groups, *states.shape[2:])
            new_NJH = by_group[row_N, group_N, :, entry_N]
            if len(self._slabs) == 1:
                self._slabs[0][part][page_N, :, slot_N] = new_NJH
                continue
            for first, slab in self._numbered():
                here = (page_N >= first) & (page_N < first + len(slab[part]))
                slab[part][page_N[here] - first, :, slot_N[here]] = new_NJH[here]
        self.counts_BG, self.longest = after_BG, int(after_BG.max())

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all entries, each [B, K, E, H], padded to the longest sequence with anything."""
        if not self._slabs:
            return torch.empty(0), torch.empty(0)
        longest = self.longest
        used_BGM = self._table_BGM[..., : -(-longest // self.page_entries)]
        out = []
        for part in (0, 1):
            if len(self._slabs) == 1:
                pages = self._slabs[0][part][used_BGM]
            else:
                pages = self._slabs[0][part].new_zeros(*used_BGM.shape, *self._slabs[0][part].shape[1:])
                for first, slab in self._numbered():
                    here = (used_BGM >= first) & (used_BGM < first + len(slab[part]))
                    pages[here] = slab[part][used_BGM[here] - first]
            # [B, G, M, J, P, H] to [B, G * J, M * P, H]
            out.append(pages.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :longest])
        return out[0], out[1]

    def products(self, query_BKRH: torch.Tensor) -> torch.Tensor:
        """Products of queries with the keys of all entries, without gathering keys.

        Args:
            query_BKRH: queries by KV head.

        Returns:
            [B, K, R, E], padded to the longest sequence with anything.

        Raises:
            ValueError: if two sequences may share a page: `view` serves them.
        """
        if not self.longest:
            return query_BKRH.new_zeros(*query_BKRH.shape[:3], 0)
        rows, groups, pages = self._table_BGM.shape
        heads, few, width = query_BKRH.shape[1] // groups, *query_BKRH.shape[2:]
        owners = self._owners_of_pages()
        query = query_BKRH.reshape(rows * groups, -1).index_select(0, owners.asking_N).view(-1, few, width)
        products = [
            torch.bmm(query[first * heads :][: len(keys) * heads], keys.flatten(0, 1).transpose(1, 2))
            for first, (keys, _) in self._numbered()
        ]
        by_page = _joined(products).view(-1, heads, few, self.page_entries)
        by_place = by_page.index_select(0, self._table_BGM.flatten()).view(rows, groups, pages, heads, few, -1)
        return by_place.permute(0, 1, 3, 4, 2, 5).reshape(rows, -1, few, pages * self.page_entries)[..., : self.longest]

    def mixed(self, weights_BKRE: torch.Tensor) -> torch.Tensor:
        """Sums of the values of all entries, without gathering values.

        Args:
            weights_BKRE: of each entry, 0 in padding; entries as `products` returns them.

        Returns:
            [B, K, R, H].

        Raises:
            ValueError: if two sequences may share a page: `view` serves them.
        """
        rows, groups, pages = self._table_BGM.shape
        few = weights_BKRE.shape[2]
        heads, width = self._slabs[0][1].shape[1], self._slabs[0][1].shape[3]
        owners = self._owners_of_pages()
        padded = torch.nn.functional.pad(weights_BKRE, (0, pages * self.page_entries - weights_BKRE.shape[3]))
        by_place = padded.view(rows, groups, heads, few, pages, self.page_entries).permute(0, 1, 4, 2, 3, 5)
        by_page = (
            by_place.reshape(rows * groups * pages, -1).index_select(0, owners.place_N).view(-1, few, self.page_entries)
        )
        sums = [
            torch.bmm(by_page[first * heads :][: len(values) * heads], values.flatten(0, 1))
            for first, (_, values) in self._numbered()
        ]
        total = weights_BKRE.new_zeros(rows * groups + 1, heads * few * width)
        total.index_add_(0, owners.sequence_N, _joined(sums).view(-1, heads * few * width))
        return total[:-1].view(rows, groups * heads, few, width)

    def _owners_of_pages(self) -> _Owners:
        if self._shared:
            raise ValueError("pages that sequences share have no one owner")
        if self._owners is None:
            rows, groups, pages = self._table_BGM.shape
            held = self._held().flatten()
            place = held.nonzero()[:, 0]
            named = self._table_BGM.flatten()[held]
            total = sum(len(keys) for keys, _ in self._slabs)
            sequence_N = place.new_full((total,), rows * groups)
            place_N = place.new_zeros(total)
            sequence_N[named], place_N[named] = place // pages, place
            self._owners = _Owners(sequence_N, sequence_N % (rows * groups), place_N)
        return self._owners

    def truncate(self, counts_BG: torch.Tensor) -> None:
        """Forget the newest entries of each sequence.

        Args:
            counts_BG: entries that each keeps, at most as many as it has.

        Raises:
            ValueError: if a sequence has fewer.
        """
        if bool((counts_BG > self.counts_BG).any()):
            raise ValueError("a sequence cannot be truncated to more entries than it has")
        self.counts_BG, self.longest = counts_BG.clone(), int(counts_BG.max())
        self._table_BGM = self._table_BGM[..., : -(-self.longest // self.page_entries)]
        self._collect()

    def select(self, rows: torch.Tensor) -> None:
        """Keep, reorder or repeat rows: copies block tables, no entries."""
        if not self.counts_BG.numel():
            return
        rows = rows.to(self.counts_BG.device)
        self._shared |= len(set(rows.tolist())) < len(rows)
        self.counts_BG = self.counts_BG.index_select(0, rows)
        self.longest = max(self.counts_BG.flatten().tolist(), default=0)
        self._table_BGM = self._table_BGM.index_select(0, rows)
        self._collect()

    def stored_bytes(self) -> int:
        """Bytes of all pages, those that wait for entries too, and of the tables."""
        tensors = [self._table_BGM, self.counts_BG, *(part for slab in self._slabs for part in slab)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def _numbered(self) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Slabs with the number of their first page."""
        first = 0
        for slab in self._slabs:
            yield first, slab
            first += slab[0].shape[0]

    def _held(self) -> torch.Tensor:
        """Which places of the tables hold a page."""
        places = torch.arange(self._table_BGM.shape[2], device=self._table_BGM.device)
        needed_BG = -(-self.counts_BG // self.page_entries)
        return places < needed_BG[..., None]

    def _reserve(self, counts_BG: torch.Tensor) -> None:
        """Give every sequence the pages that it needs for so many entries."""
        needed_BG = -(-counts_BG // self.page_entries)
        if torch.equal(needed_BG, -(-self.counts_BG // self.page_entries)):
            return
        most = int(needed_BG.max())
        held_BGM = self._held()
        more = most - self._table_BGM.shape[2]
        if more > 0:
            self._table_BGM = torch.nn.functional.pad(self._table_BGM, (0, more))
            held_BGM = torch.nn.functional.pad(held_BGM, (0, more))
        places = torch.arange(self._table_BGM.shape[2], device=counts_BG.device)
        missing_BGM = (places < needed_BG[..., None]) & ~held_BGM
        wanted = int(missing_BGM.sum())
        if wanted or more > 0:
            self._owners = None
        if wanted:
            self._table_BGM[missing_BGM] = torch.tensor(self._take(wanted), device=counts_BG.device)

    def _take(self, wanted: int) -> list[int]:
        """Numbers of free pages; where they run out, a new slab: a quarter of all before, or what is wanted."""
        if len(self._free) < wanted:
            total = sum(len(keys) for keys, _ in self._slabs)
            more = max(wanted - len(self._free), total // 4)
            keys, _ = self._slabs[0]
            new = tuple(keys.new_zeros(more, *keys.shape[1:]) for _ in "kv")
            self._slabs = [*(slab for slab in self._slabs if len(slab[0])), (new[0], new[1])]
            self._free += range(total, total + more)
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def _collect(self) -> None:
        """Free the pages that no table names any more."""
        self._owners = None
        named = set(self._table_BGM[self._held()].tolist())
        total = sum(len(keys) for keys, _ in self._slabs)
        self._free = [page for page in range(total) if page not in named]

    def _own_last_pages(self) -> None:
        """Before writing: copy half-filled pages that another sequence names too."""
        if not self._shared:
            return
        names = Counter(self._table_BGM[self._held()].tolist())
        for row, group in (self.counts_BG % self.page_entries != 0).nonzero().tolist():
            place = int(self.counts_BG[row, group]) // self.page_entries
            page = int(self._table_BGM[row, group, place])
            if names[page] > 1:
                names[page] -= 1
                (copy,) = self._take(1)
                names[copy] = 1
                for part in (0, 1):
                    self._page(copy, part).copy_(self._page(page, part))
                self._table_BGM[row, group, place] = copy
                self._owners = None
        self._shared = max(names.values(), default=0) > 1

    def _page(self, number: int, part: int) -> torch.Tensor:
        for first, slab in self._numbered():
            if number < first + len(slab[part]):
                return slab[part][number - first]
        raise AssertionError(number)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """All parts as one tensor, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
