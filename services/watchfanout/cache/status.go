package cache

import (
	"sort"
	"time"
)

// Status is what an operator sees of one resource.
type Status struct {
	Name            string `json:"name"`
	Loaded          bool   `json:"loaded"`
	Objects         int    `json:"objects"`
	Bytes           int    `json:"bytes"`
	Events          int    `json:"events"`
	EventBytes      int    `json:"eventBytes"`
	OldestResumable int64  `json:"oldestResumable"`
	Watches         int    `json:"watches"`
	Triggers        int    `json:"triggers"`
	Indexes         int    `json:"indexes"`
	Unreadable      int    `json:"unreadable"`
}

// Resources lists the resources by name.
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
			OldestResumable: r.low,
			Watches:         r.subscribers,
			Triggers:        len(r.triggers),
			Indexes:         len(r.indexes),
			Unreadable:      len(r.unreadable),
		}
		if r.tree != nil {
			s.Objects = r.tree.Len()
		}
		all = append(all, s)
	})
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Resets is how often something had to be forgotten because the log had a gap, or held what could not be read.
func (c *Cache) Resets() int64 { return c.resets.Load() }

// Lag is how long the newest event took from the publisher to here.
func (c *Cache) Lag() time.Duration {
	observed := c.observed.Load()
	if observed == 0 {
		return 0
	}
	return max(0, time.Duration(c.applied.Load()-observed))
}

// Sweep forgets the objects of resources that nobody has read for IdleTimeout, and most of their events; and of every
// resource what frames have made too much of its events, and what topics hold that the ring has forgotten.
func (c *Cache) Sweep() (dropped []string) {
	c.each(func(r *Resource) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.tree != nil && r.loading == nil && c.IdleTimeout > 0 && time.Since(r.lastUsed) > c.IdleTimeout {
			r.drop()
			dropped = append(dropped, r.Name)
		}
		r.trim(r.bound())
		r.trimTriggers()
	})
	sort.Strings(dropped)
	return dropped
}
