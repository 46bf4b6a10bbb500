package cache

import (
	"sort"
	"time"
)

// Status is the state of one resource, for the status page.
type Status struct {
	Name    string `json:"name"`
	Loaded  bool   `json:"loaded"`
	Objects int    `json:"objects"`
	// Bytes and EventBytes are sizes before compression. Of them, PackedBytes are held compressed, as CompressedBytes.
	// Readers have unpacked UnpackedBytes of PackedBytes, which are in memory too.
	Bytes           int   `json:"bytes"`
	PackedBytes     int   `json:"packedBytes"`
	CompressedBytes int   `json:"compressedBytes"`
	UnpackedBytes   int   `json:"unpackedBytes"`
	Events          int   `json:"events"`
	EventBytes      int   `json:"eventBytes"`
	OldestResumable int64 `json:"oldestResumable"`
	Watches         int   `json:"watches"`
	Triggers        int   `json:"triggers"`
	Indexes         int   `json:"indexes"`
	Unreadable      int   `json:"unreadable"`
}

// Memory returns the bytes of the objects and events in memory, without frames that are not counted.
func (s *Status) Memory() int {
	return max(0, s.Bytes+s.EventBytes-s.PackedBytes) + s.CompressedBytes + s.UnpackedBytes
}

// Resources returns the status of every resource, by name.
func (c *Cache) Resources() []Status {
	var all []Status
	c.each(func(r *Resource) {
		r.mu.Lock()
		defer r.mu.Unlock()
		s := Status{
			Name:            r.Name,
			Loaded:          r.tree != nil,
			Bytes:           r.bytes,
			Events:          r.events.Len(),
			EventBytes:      int(r.ringBytes.Load()),
			OldestResumable: r.horizon.Low.Revision,
			Watches:         r.subscribers,
			Triggers:        len(r.triggers),
			Indexes:         len(r.indexes),
			Unreadable:      len(r.unreadable),
		}
		if p := r.packed.Load(); p != nil {
			s.PackedBytes, s.CompressedBytes, s.UnpackedBytes = p.original, p.compressed, p.unpacked
		}
		if r.tree != nil {
			s.Objects = r.tree.Len()
		}
		all = append(all, s)
	})
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Resets returns the number of resets of a resource or of the cache: the log had a gap or an unreadable message.
func (c *Cache) Resets() int64 { return c.resets.Load() }

// Lag returns the time from the publisher to this replica of the newest event. It includes the difference of their
// hosts' clocks.
func (c *Cache) Lag() time.Duration {
	observed := c.observed.Load()
	if observed == 0 {
		return 0
	}
	return max(0, time.Duration(c.applied.Load()-observed))
}

// Sweep unloads the resources without readers for IdleTimeout, and trims their rings to a share of the bound. It trims
// every ring that has old events to that share too, and every ring that frames have grown beyond its bound. About every
// packPeriod it packs unchanged objects, and drops unread frames and unpacked bytes. It returns the names of the
// unloaded resources. A single goroutine calls it.
func (c *Cache) Sweep() (dropped []string) {
	c.each(func(r *Resource) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.tree != nil && r.loading == nil && c.IdleTimeout > 0 && time.Since(r.lastUsed) > c.IdleTimeout {
			r.drop()
			dropped = append(dropped, r.Name)
		}
		r.trim()
		if !c.eventsOnly {
			r.trimOld(time.Now())
		}
	})
	c.packUnchanged(time.Now())
	sort.Strings(dropped)
	return dropped
}
