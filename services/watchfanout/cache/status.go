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
	Topics          int    `json:"topics"`
	Indexes         int    `json:"indexes"`
}

// Resources lists the resources by name.
func (c *Cache) Resources() []Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Status
	for _, r := range c.resources {
		s := Status{Name: r.Name, Loaded: r.tree != nil, Bytes: r.bytes, Events: len(r.all.events), EventBytes: r.ringBytes, OldestResumable: r.low,
			Watches: r.followers, Topics: len(r.topics), Indexes: len(r.indexes)}
		if r.tree != nil {
			s.Objects = r.tree.Len()
		}
		all = append(all, s)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// Resets is how often something had to be forgotten because the log had a gap, or held what could not be read.
func (c *Cache) Resets() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resets
}

// Lag is how long the newest event took from the publisher to here.
func (c *Cache) Lag() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.observed == 0 {
		return 0
	}
	return max(0, time.Duration(c.applied-c.observed))
}

// Sweep forgets the objects of resources that nobody has read for IdleAfter, and most of their events.
func (c *Cache) Sweep() (dropped []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.resources {
		if c.IdleAfter <= 0 || time.Since(r.used) <= c.IdleAfter {
			continue
		}
		if r.tree != nil {
			r.drop()
			dropped = append(dropped, r.Name)
		}
		r.trim(r.bound())
	}
	sort.Strings(dropped)
	return dropped
}
