package lru

import (
	"testing"
	"time"
)

func TestLeastRecentlyUsedIsEvicted(t *testing.T) {
	c := New[string, int](10)
	c.Put("a", 1, 4)
	c.Put("b", 2, 4)
	if v, ok := c.Get("a"); !ok || v != 1 {
		t.Error(v, ok)
	}
	c.Put("c", 3, 4) // evicts b
	if _, ok := c.Get("b"); ok || c.Bytes() != 8 {
		t.Errorf("b is kept: %v, %d bytes", ok, c.Bytes())
	}
	c.Put("a", 1, 6)
	if c.Bytes() != 10 {
		t.Errorf("%d bytes", c.Bytes())
	}
	c.Put("c", 4, 11) // larger than the cache: it evicts no other value
	if _, ok := c.Get("c"); ok || c.Bytes() != 6 {
		t.Errorf("c is kept: %v, %d bytes", ok, c.Bytes())
	}
}

func TestConditions(t *testing.T) {
	c := New[string, int](10)
	one := func(v int) bool { return v == 1 }
	if c.PutUnless("a", one, 1, 2) != 1 || c.PutUnless("a", one, 2, 3) != 1 {
		t.Error("it does not stay")
	}
	if v, _ := c.Get("a"); v != 1 || c.Bytes() != 2 {
		t.Error(v, c.Bytes())
	}
	c.Put("a", 2, 3)
	c.RemoveIf("a", one)
	c.RemoveIf("b", one)
	if v, ok := c.Get("a"); v != 2 || !ok || c.Bytes() != 3 {
		t.Error(v, ok, c.Bytes())
	}
	c.Put("b", 3, 3)
	c.RemoveIf("a", func(int) bool { return false }) // RemoveIf does not mark a as used
	c.Put("c", 4, 5)
	if _, ok := c.Get("a"); ok {
		t.Error("a was not the one to go")
	}
	c.RemoveIf("b", func(int) bool { return true })
	if _, ok := c.Get("b"); ok || c.Bytes() != 5 {
		t.Error(ok, c.Bytes())
	}
}

func TestEvictIdle(t *testing.T) {
	c := New[string, int](10)
	c.Put("a", 1, 2)
	if c.EvictIdle(time.Hour); c.Bytes() != 2 {
		t.Error("what was asked for just now is gone")
	}
	if c.Clear(); c.Bytes() != 0 {
		t.Error("it is kept")
	}
}
