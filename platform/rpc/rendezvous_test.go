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
	info := base.PickerBuildInfo{ReadySCs: map[balancer.SubConn]base.SubConnInfo{}}
	for _, a := range addresses {
		info.ReadySCs[&conn{address: a}] = base.SubConnInfo{Address: resolver.Address{Addr: a}}
	}
	return rendezvous{}.Build(info)
}

func chosen(t *testing.T, p balancer.Picker, key string) map[string]bool {
	t.Helper()
	got := map[string]bool{}
	for range 8 {
		r, err := p.Pick(balancer.PickInfo{Ctx: Routed(t.Context(), key)})
		if err != nil {
			t.Fatal(err)
		}
		got[r.SubConn.(*conn).address] = true
	}
	return got
}

func TestEveryKeyHasTwoReplicasAndTheyHaveEquallyMany(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3", "a:4")
	load := map[string]int{}
	for i := range 400 {
		of := chosen(t, p, fmt.Sprint("resource", i))
		if len(of) != 2 {
			t.Fatalf("%v", of)
		}
		for a := range of {
			load[a]++
		}
	}
	for a, n := range load {
		if n < 150 || n > 250 {
			t.Errorf("%s serves %d of 400 keys; all: %v", a, n, load)
		}
	}
}

func TestOnlyWhatALostReplicaServedMoves(t *testing.T) {
	before, after := pickerOf("a:1", "a:2", "a:3", "a:4"), pickerOf("a:1", "a:2", "a:4")
	for i := range 100 {
		key := fmt.Sprint("resource", i)
		was, is := chosen(t, before, key), chosen(t, after, key)
		for a := range was {
			if a != "a:3" && !is[a] {
				t.Errorf("%s moved off %s: %v, then %v", key, a, was, is)
			}
		}
	}
	if of := chosen(t, pickerOf("a:1"), "x"); len(of) != 1 {
		t.Errorf("%v", of)
	}
	if _, err := pickerOf().Pick(balancer.PickInfo{Ctx: t.Context()}); err != balancer.ErrNoSubConnAvailable {
		t.Error(err)
	}
}
