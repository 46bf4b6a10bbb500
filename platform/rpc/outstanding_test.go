package rpc

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"
)

// picked picks a replica for a call, and returns its address and the function that ends the call.
func picked(t *testing.T, p balancer.Picker, ctx context.Context) (address string, done func(balancer.DoneInfo)) {
	t.Helper()
	r, err := p.Pick(balancer.PickInfo{Ctx: ctx})
	if err != nil {
		t.Fatal(err)
	}
	if r.Done == nil {
		r.Done = func(balancer.DoneInfo) {}
	}
	return r.SubConn.(*conn).address, r.Done
}

// unaryOf marks the call of a tracked context as unary.
func unaryOf(ctx context.Context) context.Context {
	callStateOf(ctx).unary.Store(true)
	return ctx
}

// loads returns how many of 20 streams each replica gets.
func loads(t *testing.T, p balancer.Picker) string {
	t.Helper()
	load := map[string]int{}
	for range 20 {
		address, _ := picked(t, p, t.Context())
		load[address]++
	}
	return fmt.Sprint(load)
}

// busy gives a replica an outstanding call, and returns the function that ends the call.
func busy(t *testing.T, p balancer.Picker, which string) (done func(balancer.DoneInfo)) {
	t.Helper()
	for range 10 {
		address, done := picked(t, p, unaryOf(TrackReplica(t.Context())))
		if address == which {
			return done
		}
		done(balancer.DoneInfo{})
	}
	t.Fatalf("nothing goes to %s", which)
	return nil
}

var errLeft = status.Error(codes.Canceled, "the caller has left")

// Calls with one key go to the same replica. Many keys are balanced, and only the keys of a lost replica move.
func TestAffinity(t *testing.T) {
	p, without := pickerOf("a:1", "a:2", "a:3"), pickerOf("a:1", "a:3")
	pick := func(p balancer.Picker, key string) string {
		address, done := picked(t, p, WithAffinity(t.Context(), key))
		done(balancer.DoneInfo{})
		return address
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

// An overloaded replica shares its calls with the second replica of the key. If both are overloaded, every replica gets
// calls.
func TestOverloadedReplicasShareCalls(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3")
	load, preferred := map[string]int{}, ""
	call := func(n int) {
		for range n {
			address, _ := picked(t, p, unaryOf(WithAffinity(t.Context(), "configmaps/kube-system/hot")))
			if preferred == "" {
				preferred = address
			}
			load[address]++
		}
	}
	call(60)
	if other := 60 - load[preferred]; len(load) != 2 || load[preferred] < 2*other || other < 10 {
		t.Errorf("of 60 calls without a response %d are at the preferred replica: %v", load[preferred], load)
	}
	call(140)
	if len(load) != 3 || load[preferred] < 80 || slices.Min(slices.Collect(maps.Values(load))) < 30 {
		t.Errorf("of 200 calls without a response %d are at the preferred replica: %v", load[preferred], load)
	}
}

// A busy replica keeps its affinity. An unresponsive replica loses it until it responds.
func TestUnresponsiveReplicasLoseAffinity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pickerOf("a:1", "a:2", "a:3")
		pick := func() (string, func(balancer.DoneInfo)) {
			return picked(t, p, unaryOf(WithAffinity(t.Context(), "leases/kube-system/kube-scheduler")))
		}
		preferred, stuck := pick()
		time.Sleep(unresponsiveAfter) // of the bubble's clock
		if again, done := pick(); again != preferred {
			t.Errorf("a busy replica is left for %s", again)
		} else {
			time.Sleep(time.Nanosecond) // of the bubble's clock
			if other, done := pick(); other == preferred {
				t.Error("an unresponsive replica is preferred")
			} else {
				done(balancer.DoneInfo{})
			}
			done(balancer.DoneInfo{})
		}
		if again, done := pick(); again != preferred {
			t.Errorf("a replica that responds again is left for %s", again)
		} else {
			done(balancer.DoneInfo{})
		}
		stuck(balancer.DoneInfo{})
	})
}

// A retried call goes to another replica, even if all are ejected.
func TestRepeatedCallsGoToAnotherReplica(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3")
	for _, r := range p.(*picker).ready {
		r.eject()
	}
	ctx := WithAffinity(t.Context(), "leases/kube-system/kube-scheduler")
	first, _ := picked(t, p, ctx)
	second, _ := picked(t, p, ctx)
	third, _ := picked(t, p, ctx)
	if first == second || third == second {
		t.Errorf("to %s, %s, %s", first, second, third)
	}
}

// If both replicas of a key are unresponsive, a call goes to a third. An overloaded replica keeps its calls while the
// second is unresponsive.
func TestUnresponsiveReplicasAreSkipped(t *testing.T) {
	p := pickerOf("a:1", "a:2", "a:3")
	ctx := WithAffinity(t.Context(), "leases/kube-system/kube-scheduler")
	replicas := p.(*picker).serving(callStateOf(ctx).slot)
	replicas[1].eject()
	replicas[0].calls.Store(2 * overloaded)
	replicas[0].since.Store(monotonic())
	if a, _ := picked(t, p, ctx); a != replicas[0].address {
		t.Errorf("an overloaded replica is left for %s, though the second is unresponsive", a)
	}
	replicas[0].eject()
	if a, _ := picked(t, p, WithAffinity(t.Context(), "leases/kube-system/kube-scheduler")); a == replicas[0].address ||
		a == replicas[1].address {
		t.Errorf("it goes to %s, which is unresponsive", a)
	}
}

func TestLeastRequest(t *testing.T) {
	p := pickerOf("a:1", "a:2")
	if l := loads(t, p); l != "map[a:1:10 a:2:10]" {
		t.Error(l)
	}
	done := busy(t, p, "a:1")
	if l := loads(t, p); l != "map[a:2:20]" {
		t.Error(l)
	}
	if done(balancer.DoneInfo{}); loads(t, p) != "map[a:1:10 a:2:10]" {
		t.Error(loads(t, p))
	}
}

// A canceled call does not eject its replica, which may only be slow. A hedged call does, for ejectionTime or until
// the replica responds.
func TestEjectionEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const both, other = "map[a:1:10 a:2:10]", "map[a:2:20]"
		p := pickerOf("a:1", "a:2")
		is := func(name, want string) {
			t.Helper()
			if l := loads(t, p); l != want {
				t.Errorf("%s: %s, want %s", name, l, want)
			}
		}
		done := busy(t, p, "a:1")
		time.Sleep(unresponsiveAfter + 1) // of the bubble's clock
		done(balancer.DoneInfo{Err: errLeft})
		is("a caller has left", both)
		done = busy(t, p, "a:1")
		time.Sleep(unresponsiveAfter + 1) // of the bubble's clock
		done(balancer.DoneInfo{Err: errLeft, BytesReceived: true})
		is("a caller was refused", both)
		a1 := p.(*picker).ready[0]
		done = a1.begin()
		a1.eject()
		done(balancer.DoneInfo{Err: errLeft})
		is("another was asked", other)
		time.Sleep(ejectionTime - 1) // of the bubble's clock
		is("another was asked, later", other)
		time.Sleep(time.Nanosecond) // of the bubble's clock
		is("another was asked, much later", both)
		done = a1.begin()
		a1.eject()
		done(balancer.DoneInfo{})
		is("it has answered after all", both)
	})
}

// A new picker keeps the outstanding calls of its replicas.
func TestOutstandingSurvivesUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRendezvous()
		a, b, c := &conn{address: "a:1"}, &conn{address: "a:2"}, &conn{address: "a:3"}
		build := func(conns ...*conn) balancer.Picker {
			info := base.PickerBuildInfo{ReadySCs: map[balancer.SubConn]base.SubConnInfo{}}
			for _, c := range conns {
				info.ReadySCs[c] = base.SubConnInfo{Address: resolver.Address{Addr: c.address}}
			}
			return r.Build(info)
		}
		busy(t, build(a, b), "a:1")
		time.Sleep(unresponsiveAfter + 1) // of the bubble's clock
		if l := loads(t, build(a, b, c)); l != "map[a:2:10 a:3:10]" {
			t.Error(l)
		}
	})
}

// Unary calls are counted as outstanding. Streams are not.
func TestUnaryCallsCount(t *testing.T) {
	p := pickerOf("a:1")
	own := p.(*picker).ready[0].outstanding
	picked(t, p, TrackReplica(t.Context()))
	picked(t, p, WithAffinity(t.Context(), "a"))
	picked(t, p, t.Context())
	if n := own.calls.Load(); n != 0 {
		t.Errorf("%d streams count", n)
	}
	for i, ctx := range []context.Context{t.Context(), TrackReplica(t.Context()), WithAffinity(t.Context(), "a")} {
		err := trackUnary(ctx, "m", nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn,
			_ ...grpc.CallOption) error {
			picked(t, p, ctx)
			return nil
		})
		if n := own.calls.Load(); err != nil || n != int64(i)+1 {
			t.Errorf("%d of %d unary calls count: %v", n, i+1, err)
		}
	}
}
