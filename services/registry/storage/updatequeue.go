package storage

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/turns"
)

const (
	// longestUpdate is how long an update may keep the next update waiting. It bounds the delay by an admission webhook
	// that responds slowly, or that itself updates the object.
	longestUpdate = time.Second
	// longestWait is how long an update that waits for a processor may keep the next update waiting.
	longestWait = time.Minute
	// turnsPerProcessor is the number of updates that may compute for each processor. An update that waits for an
	// admission webhook has its turn for up to turns.Slice.
	turnsPerProcessor = 4
)

// updateQueue orders updates, so that an overloaded registry completes the updates that it begins (docs/design/0044).
//
// The updates of an object by an owner run in the order of their arrival. Upstream runs them at the same time: a single
// update then succeeds, and the others compute theirs again, which costs n²/2 computations for n requests. The order is
// an optimization only: etcd's transaction still decides, also between owners and between registries. No owner waits
// for another owner's updates.
//
// The updates of all objects take turns on the processors, by owner in rotation. If thousands computed at the same
// time, then the responses of etcd and the renewals of elections would wait for all of them.
type updateQueue struct {
	processors *turns.Turns

	mu sync.Mutex
	// objects has the order of each object and owner with an update in progress.
	objects map[ownedKey]*objectOrder
}

// ownedKey is an object's key in etcd, and the owner of an update of it.
type ownedKey struct{ owner, key string }

// objectOrder is the order of an owner's updates of an object. A single update has the turn.
type objectOrder struct {
	*turns.Turns
	// updates is the number of updates that wait or have the turn. updateQueue.mu guards it.
	updates int
}

// update is an update in the order of its object. first is its turn among the updates of the object, and processor its
// turn among all updates.
type update struct {
	queue            *updateQueue
	key              ownedKey
	first, processor *turns.Turn
}

func newUpdateQueue() *updateQueue { return updateQueueOf(turnsPerProcessor * runtime.GOMAXPROCS(0)) }

// updateQueueOf returns a queue of which at most limit updates have a turn on the processors.
func updateQueueOf(limit int) *updateQueue {
	return &updateQueue{
		processors: turns.New("updates", limit, turns.Slice),
		objects:    map[ownedKey]*objectOrder{},
	}
}

// Collectors returns the metrics of this storage.
func (s *Storage) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_registry_updates_waiting",
		Help: "Number of updates that wait for a turn on the processors: at most the next of each user and object.",
	}, func() float64 { return float64(s.updateQueue.processors.Waiting()) })}
}

// begin waits for the owner's updates of the key before, and for a turn on the processors. The caller reads the object
// after that, yields the processor when it has computed the new object, and calls end after its update. The error is
// ctx's.
func (q *updateQueue) begin(ctx context.Context, key string) (*update, error) {
	u := &update{queue: q, key: ownedKey{key: key}}
	if by, ok := request.UserFrom(ctx); ok {
		u.key.owner = identity.Owner(by.GetName())
	}
	u.first, _ = q.orderOf(u.key).NewTurn(ctx, "")
	u.processor, _ = q.processors.NewTurn(ctx, u.key.owner)
	err := u.first.Take(ctx)
	if err == nil {
		err = u.processor.Take(ctx)
	}
	if err != nil {
		u.end()
		return nil, err
	}
	u.first.EndAfter(longestUpdate)
	return u, nil
}

// orderOf returns the order of an object, and counts an update that end removes.
func (q *updateQueue) orderOf(key ownedKey) *objectOrder {
	q.mu.Lock()
	defer q.mu.Unlock()
	o := q.objects[key]
	if o == nil {
		o = &objectOrder{Turns: turns.New("updates of an object", 1, longestWait)}
		q.objects[key] = o
	}
	o.updates++
	return o
}

// end lets the next update of the object begin.
func (u *update) end() {
	u.processor.Yield()
	u.first.Yield()
	u.queue.mu.Lock()
	defer u.queue.mu.Unlock()
	o := u.queue.objects[u.key]
	if o.updates--; o.updates == 0 {
		delete(u.queue.objects, u.key)
	}
}
