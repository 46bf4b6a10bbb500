package rpc

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/resolver"
)

type conn struct {
	balancer.SubConn
	address string
}

func pickerOf(addresses ...string) balancer.Picker {
	return readyOf(newRendezvous(), addresses...)
}

func readyOf(r *rendezvous, addresses ...string) balancer.Picker {
	info := base.PickerBuildInfo{ReadySCs: map[balancer.SubConn]base.SubConnInfo{}}
	for _, a := range addresses {
		info.ReadySCs[&conn{address: a}] = base.SubConnInfo{Address: resolver.Address{Addr: a}}
	}
	return r.Build(info)
}

func chosen(t *testing.T, p balancer.Picker, key string) map[string]bool {
	t.Helper()
	got := map[string]bool{}
	for range 8 {
		r, err := p.Pick(balancer.PickInfo{Ctx: WithHashKey(t.Context(), key)})
		if err != nil {
			t.Fatal(err)
		}
		got[r.SubConn.(*conn).address] = true
	}
	return got
}

func TestKeysAreBalanced(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3", "a:4")
	load := map[string]int{}
	for i := range 400 {
		replicas := chosen(t, p, fmt.Sprint("resource", i))
		if len(replicas) != 2 {
			t.Fatalf("%v", replicas)
		}
		for a := range replicas {
			load[a]++
		}
	}
	for a, n := range load {
		if n < 150 || n > 250 {
			t.Errorf("%s serves %d of 400 keys; all: %v", a, n, load)
		}
	}
}

func TestOnlyLostKeysMove(t *testing.T) {
	before, after := pickerOf("a:1", "a:2", "a:3", "a:4"), pickerOf("a:1", "a:2", "a:4")
	for i := range 100 {
		key := fmt.Sprint("resource", i)
		previous, is := chosen(t, before, key), chosen(t, after, key)
		for a := range previous {
			if a != "a:3" && !is[a] {
				t.Errorf("%s moved off %s: %v, then %v", key, a, previous, is)
			}
		}
	}
	if replicas := chosen(t, pickerOf("a:1"), "x"); len(replicas) != 1 {
		t.Errorf("%v", replicas)
	}
	if _, err := pickerOf().Pick(balancer.PickInfo{Ctx: t.Context()}); err != balancer.ErrNoSubConnAvailable {
		t.Error(err)
	}
}

// A long call's callback runs when its replica no longer serves its key. Other replicas may come or go, or an old
// picker may pick. The callback does not run while the replica serves the key, or after the call has ended.
func TestReassignment(t *testing.T) {
	r := newRendezvous()
	reassigned := make(chan string, 100)
	begin := func(p balancer.Picker, key string) (address string, done func(balancer.DoneInfo)) {
		ctx := WithReassignment(t.Context(), key, func() { reassigned <- key })
		got, err := p.Pick(balancer.PickInfo{Ctx: ctx})
		if err != nil {
			t.Fatal(err)
		}
		return got.SubConn.(*conn).address, got.Done
	}
	old := readyOf(r, "a:1", "a:2")
	addresses := map[string]string{}
	for i := range 50 {
		key := fmt.Sprint("resource", i)
		addresses[key], _ = begin(old, key)
	}
	_, done := begin(old, "ended")
	done(balancer.DoneInfo{})
	readyOf(r) // no replica is ready: no call can move
	now := readyOf(r, "a:1", "a:2", "a:3", "a:4", "a:5", "a:6")
	want := map[string]bool{}
	for key, a := range addresses {
		if !chosen(t, now, key)[a] {
			want[key] = true
		}
	}
	if len(want) < 20 || len(want) > 45 {
		t.Fatalf("%d of 50 move", len(want))
	}
	for range len(want) {
		if s := <-reassigned; !want[s] {
			t.Errorf("%s is reassigned", s)
		}
	}
	for i := range 50 { // by the picker from before
		key := fmt.Sprint("late", i)
		a, _ := begin(old, key)
		if !chosen(t, now, key)[a] {
			<-reassigned
		}
	}
	if len(reassigned) > 0 || len(r.longCalls) == 0 {
		t.Errorf("%d reassigned, %d open", len(reassigned), len(r.longCalls))
	}
}

// The long calls of a key are spread over its replicas, also if other calls are picked between them. When a replica
// returns, a call moves to it.
func TestLongCallsAreSpread(t *testing.T) {
	r := newRendezvous()
	reassigned := make(chan func(), 10)
	var current balancer.Picker
	var begin func() string
	begin = func() string {
		var done func(balancer.DoneInfo)
		ctx := WithReassignment(t.Context(), "pods", func() {
			reassigned <- func() { begin(); done(balancer.DoneInfo{}) }
		})
		got, err := current.Pick(balancer.PickInfo{Ctx: ctx})
		if err != nil {
			t.Fatal(err)
		}
		done = got.Done
		return got.SubConn.(*conn).address
	}
	current = readyOf(r, "a:1", "a:2")
	first := begin()
	if _, err := current.Pick(balancer.PickInfo{Ctx: WithHashKey(t.Context(), "pods")}); err != nil {
		t.Fatal(err)
	}
	if second := begin(); first == second {
		t.Errorf("both calls are at %s", first)
	}
	current = readyOf(r, "a:1")
	(<-reassigned)()
	if n := r.callsAt[placement{"pods", "a:1"}]; n != 2 {
		t.Errorf("%d calls are at the last replica", n)
	}
	current = readyOf(r, "a:1", "a:2")
	(<-reassigned)()
	if n := r.callsAt[placement{"pods", "a:1"}]; n != 1 || len(reassigned) != 0 || len(r.longCalls) != 2 {
		t.Errorf("%d calls are at the first replica, %d of %d move", n, len(reassigned), len(r.longCalls))
	}
	readyOf(r, "a:1", "a:2")
	if len(reassigned) != 0 {
		t.Error("a balanced call moves")
	}
}
