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
	return readyOf(&rendezvous{open: map[*stay]struct{}{}}, addresses...)
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

// A call that lasts is told when its replica does not serve its key any more: of replicas that come, of those that go,
// and where it was picked a moment too late; not while its replica does, nor once the call has ended.
func TestACallThatLastsIsToldThatItsKeyHasMoved(t *testing.T) {
	r := &rendezvous{open: map[*stay]struct{}{}}
	told := make(chan string, 100)
	begin := func(p balancer.Picker, key string) (address string, done func(balancer.DoneInfo)) {
		ctx := Staying(t.Context(), key, func() { told <- key })
		got, err := p.Pick(balancer.PickInfo{Ctx: ctx})
		if err != nil {
			t.Fatal(err)
		}
		return got.SubConn.(*conn).address, got.Done
	}
	old := readyOf(r, "a:1", "a:2")
	at := map[string]string{}
	for i := range 50 {
		key := fmt.Sprint("resource", i)
		at[key], _ = begin(old, key)
	}
	_, done := begin(old, "ended")
	done(balancer.DoneInfo{})
	readyOf(r) // nobody is ready: there is nowhere to go
	now := readyOf(r, "a:1", "a:2", "a:3", "a:4", "a:5", "a:6")
	want := map[string]bool{}
	for key, a := range at {
		if !chosen(t, now, key)[a] {
			want[key] = true
		}
	}
	if len(want) < 20 || len(want) > 45 {
		t.Fatalf("%d of 50 move", len(want))
	}
	for range len(want) {
		if s := <-told; !want[s] {
			t.Errorf("%s is told to move", s)
		}
	}
	for i := range 50 { // by the picker from before
		key := fmt.Sprint("late", i)
		a, _ := begin(old, key)
		if !chosen(t, now, key)[a] {
			<-told
		}
	}
	if len(told) > 0 || len(r.open) == 0 {
		t.Errorf("%d told, %d open", len(told), len(r.open))
	}
}
