package rpc

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"
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

// Calls about one thing go to one replica, those about many things to all alike, and to others where it is away.
func TestCallsAboutOneThingPreferOneReplica(t *testing.T) {
	p, without := pickerOf("a:1", "a:2", "a:3"), pickerOf("a:1", "a:3")
	pick := func(p balancer.Picker, key string) string {
		r, err := p.Pick(balancer.PickInfo{Ctx: Preferring(t.Context(), key)})
		if err != nil {
			t.Fatal(err)
		}
		r.Done(balancer.DoneInfo{})
		return r.SubConn.(*conn).address
	}
	load := map[string]int{}
	for i := range 3000 {
		key := fmt.Sprint("leases/x/", i)
		a := pick(p, key)
		load[a]++
		if again := pick(p, key); again != a {
			t.Fatalf("%s goes to %s, then to %s", key, a, again)
		}
		if now := pick(without, key); now == "a:2" || a != "a:2" && now != a {
			t.Errorf("%s goes to %s, and to %s when a:2 is away", key, a, now)
		}
	}
	for a, n := range load {
		if n < 700 || n > 1300 {
			t.Errorf("%s is preferred by %d of 3000: %v", a, n, load)
		}
	}
}

// A replica that has something to answer and answers nothing is not preferred; one that is only busy is.
func TestASilentReplicaIsNotPreferred(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3")
	pick := func() (string, func(balancer.DoneInfo)) {
		r, err := p.Pick(balancer.PickInfo{Ctx: Preferring(t.Context(), "leases/kube-system/kube-scheduler")})
		if err != nil {
			t.Fatal(err)
		}
		return r.SubConn.(*conn).address, r.Done
	}
	preferred, done := pick()
	var own replica
	for _, r := range p.(*picker).ready {
		if r.address == preferred {
			own = r
		}
	}
	if again, d := pick(); again != preferred {
		t.Errorf("a busy replica is left for %s", again)
	} else {
		d(balancer.DoneInfo{})
	}
	own.since.Store(time.Now().Add(-2 * silentFor).UnixNano())
	other, d := pick()
	if other == preferred {
		t.Error("a silent replica is preferred")
	}
	d(balancer.DoneInfo{})
	done(balancer.DoneInfo{})
	if again, d := pick(); again != preferred {
		t.Errorf("a replica that answers again is left for %s", again)
	} else {
		d(balancer.DoneInfo{})
	}
}

// A replica with much to answer of what prefers it shares that with the next.
func TestACrowdedReplicaIsNotPreferred(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3")
	load, last := map[string]int{}, ""
	for range 200 {
		r, err := p.Pick(balancer.PickInfo{Ctx: Preferring(t.Context(), "configmaps/kube-system/hot")})
		if err != nil {
			t.Fatal(err)
		}
		last = r.SubConn.(*conn).address
		load[last]++
	}
	if len(load) != 2 || load[last] < 50 {
		t.Errorf("200 calls that nobody has answered went to %v", load)
	}
}

// A replica that answers nobody is passed by by calls that any can serve, until somebody tries it again.
func TestASilentReplicaIsPassedBy(t *testing.T) {
	p := pickerOf("a:1", "a:2")
	pick := func(ctx context.Context) balancer.PickResult {
		r, err := p.Pick(balancer.PickInfo{Ctx: ctx})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	count := func() (first, second int) {
		for range 20 {
			if pick(t.Context()).SubConn.(*conn).address == "a:1" {
				first++
			} else {
				second++
			}
		}
		return first, second
	}
	if a, b := count(); a != 10 || b != 10 {
		t.Errorf("streams go to %d and %d", a, b)
	}
	var stuck balancer.PickResult
	for stuck = pick(Noting(t.Context())); stuck.SubConn.(*conn).address != "a:1"; stuck = pick(Noting(t.Context())) {
		stuck.Done(balancer.DoneInfo{})
	}
	if a, b := count(); a != 0 || b != 20 { // which has nothing to answer
		t.Errorf("beside one that is busy, streams go to %d and %d", a, b)
	}
	own := p.(*picker).ready[0].pending // they are in order
	long := time.Now().Add(-2 * silentFor).UnixNano()
	own.since.Store(long)
	stuck.Done(balancer.DoneInfo{Err: status.Error(codes.Canceled, "the client has left")})
	if a, _ := count(); a != 0 {
		t.Error("a replica that did not answer who has left is asked")
	}
	own.avoided.Store(long)
	if a, _ := count(); a != 10 {
		t.Error("a replica that did not answer is never tried again")
	}
}
