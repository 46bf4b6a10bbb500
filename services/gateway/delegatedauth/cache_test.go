package delegatedauth

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func gauge() prometheus.Gauge { return prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}) }

func digestOf(s string) digest {
	d := newDigester()
	d.part(s)
	sum, _ := d.sum()
	return sum
}

// The cache never exceeds its bound, and an owner's entries never exceed the owner's bound.
func TestCacheIsBoundedInBytes(t *testing.T) {
	k := newCache[int](100_000, 20_000, gauge())
	for i := range 1000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 20_000 {
		t.Errorf("an owner has %d bytes", k.bytes)
	}
	k.put(digestOf("alice"), "alice", 1, 1000, time.Now().Add(time.Hour))
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("mallory", i)), "mallory", i, 1000, time.Now().Add(time.Hour))
	}
	if _, ok := k.get(digestOf("alice")); !ok {
		t.Error("an owner has evicted another")
	}
	for i := range 5000 {
		k.put(digestOf(fmt.Sprint("many", i)), fmt.Sprint("user", i), i, 1000, time.Now().Add(time.Hour))
	}
	if k.bytes > 100_000 || len(k.entries) != k.lru.Len() || len(k.owners) > len(k.entries) {
		t.Errorf("%d bytes, %d entries of %d, %d owners", k.bytes, len(k.entries), k.lru.Len(), len(k.owners))
	}
	k.put(digestOf("huge"), "x", 1, 30_000, time.Now().Add(time.Hour))
	if _, ok := k.get(digestOf("huge")); ok {
		t.Error("an entry above the owner's bound is cached")
	}
}

func TestCacheEntriesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newCache[int](100_000, 20_000, gauge())
		k.put(digestOf("a"), "a", 1, 10, time.Now().Add(time.Second))
		if _, ok := k.get(digestOf("a")); !ok {
			t.Error("it is not cached")
		}
		time.Sleep(2 * time.Second)
		if _, ok := k.get(digestOf("a")); ok || k.bytes != 0 {
			t.Errorf("it is cached for too long (%d bytes)", k.bytes)
		}
	})
}
