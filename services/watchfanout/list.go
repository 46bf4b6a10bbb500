package watchfanout

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"log/slog"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// errElsewhere is the answer to what only registry can say: an exact revision that the replica does not hold.
var errElsewhere = status.Error(codes.FailedPrecondition, "not held here; ask registry")

const (
	// freshnessTimeout is how long a read waits for a revision that has not been reached, as kube-apiserver's.
	freshnessTimeout = 3 * time.Second
	// stalledTimeout is how long, where the log has not moved lately.
	stalledTimeout = 100 * time.Millisecond
	// stalledFor is for how long, until one reader is patient again.
	stalledFor = 10 * time.Second
	// coldTimeout is how long a list waits for a resource that has to be loaded first.
	coldTimeout = 5 * time.Second
	chunkBytes  = 256 << 10
)

// List answers a list's body.
func (s *Service) List(r *watchfanoutv1.ListRequest, stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	ctx := stream.Context()
	q, err := newQuery(r.Query)
	if err == nil {
		err = s.serving()
	}
	if err != nil {
		return rpc.ToStatus(err)
	}
	s.metrics.lists.WithLabelValues(q.entry.StoredAs).Inc()
	if q.converts() || q.table && q.entry.StoredAs == sortedTable {
		return errElsewhere
	}
	page, err := s.page(ctx, q, r)
	if err != nil {
		return rpc.ToStatus(err)
	}
	parts, columns, err := s.parts(ctx, q, page.items)
	if err != nil {
		return rpc.ToStatus(err)
	}
	kind, apiVersion := q.listKind()
	head := &frame.List{Kind: kind, APIVersion: apiVersion, Revision: page.revision, Continue: page.next, Remaining: page.remaining, Columns: columns,
		Untyped: q.form.Untyped && !q.table && !q.form.Partial}
	return send(stream, q, head, parts)
}

// sortedTable is the one resource whose Tables are sorted by more than names.
const sortedTable = "flowschemas.flowcontrol.apiserver.k8s.io"

// Get answers one object's body.
func (s *Service) Get(ctx context.Context, r *watchfanoutv1.GetRequest) (*watchfanoutv1.GetResponse, error) {
	q, err := newQuery(r.Query)
	if err == nil {
		err = s.serving()
	}
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if q.table || q.form.Partial {
		return nil, errElsewhere
	}
	snapshot, _, err := s.at(ctx, q, &watchfanoutv1.ListRequest{ResourceVersion: r.ResourceVersion})
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	item, ok := snapshot.Get(cache.Key(q.namespace, r.Name))
	if !ok || !q.own(item) || q.form.Protobuf && q.form.Untyped {
		return nil, errElsewhere
	}
	if q.form.Protobuf {
		return &watchfanoutv1.GetResponse{Body: frame.Envelope(q.form.Kind, q.form.APIVersion, item.Protobuf)}, nil
	}
	body := make([]byte, 0, len(item.JSON)+len(q.form.Kind)+len(q.form.APIVersion)+32)
	return &watchfanoutv1.GetResponse{Body: append(frame.Object(body, q.form.Kind, q.form.APIVersion, item.JSON), '\n')}, nil
}

type page struct {
	items     []*cache.Item
	revision  int64
	next      string
	remaining *int64
}

// page selects a list's objects, by Kubernetes' rules for resourceVersion, limit and continue.
func (s *Service) page(ctx context.Context, q *query, r *watchfanoutv1.ListRequest) (*page, error) {
	limit := r.Limit
	if r.ResourceVersion == "0" && q.entry.StoredAs != "events" { // kube-apiserver's cache knows no limit, and it has none of events
		limit = 0
	}
	history := s.cache.History() // should it change now, the list goes on from registry
	snapshot, from, err := s.at(ctx, q, r)
	if err != nil {
		return nil, err
	}
	p := &page{revision: snapshot.Revision}
	prefix := q.prefix()
	more := false
	var lastKey string
	if name, ok := q.exactName(); ok && r.Continue == "" {
		key := cache.Key(q.namespace, name)
		if i, ok := snapshot.Get(key); ok && q.matches(i) {
			p.items = append(p.items, i)
		} else if snapshot.IsUnreadable(key) && !q.skips {
			return nil, errElsewhere
		}
		return p, nil
	}
	if _, _, bad := snapshot.Unreadable(prefix); bad && !q.skips {
		return nil, errElsewhere // which says what is wrong with it
	}
	total := int64(0)
	snapshot.ScanField(q.topic(), prefix, from, func(i *cache.Item) bool {
		if limit > 0 && int64(len(p.items)) >= limit {
			more = true
			if !q.unselected() {
				return false
			}
			total++
			return true
		}
		if q.matches(i) {
			p.items = append(p.items, i)
			lastKey = i.Key
		}
		return true
	})
	if more {
		p.next = encodeContinue(p.revision, "/"+strings.TrimPrefix(lastKey, prefix)+"\x00")
		if q.unselected() {
			p.remaining = &total
		}
		s.keep(q.entry.StoredAs, history, snapshot)
	}
	return p, nil
}

// at is the snapshot that a list is answered from, and the key to begin at.
func (s *Service) at(ctx context.Context, q *query, r *watchfanoutv1.ListRequest) (*cache.Snapshot, string, error) {
	res := s.cache.Resource(q.entry.StoredAs)
	if r.Continue != "" {
		if r.ResourceVersion != "" && r.ResourceVersion != "0" {
			return nil, "", errElsewhere // which is an error
		}
		revision, start, err := decodeContinue(r.Continue)
		if err != nil {
			return nil, "", err
		}
		if kept, ok := s.kept(q.entry.StoredAs, revision); ok {
			return kept, q.prefix() + start, nil
		}
		if err := s.reach(ctx, revision); err != nil {
			return nil, "", errElsewhere
		}
		if _, err := res.Snapshot(ctx, "", s.source, s.wait); err != nil { // loads it
			return nil, "", errElsewhere
		}
		if unchanged, ok := res.SnapshotAt(revision); ok {
			return unchanged, q.prefix() + start, nil
		}
		return nil, "", errElsewhere
	}
	switch rv := r.ResourceVersion; {
	case r.ResourceVersionMatch == string(metav1.ResourceVersionMatchExact), rv != "" && rv != "0" && r.Limit > 0 && r.ResourceVersionMatch == "":
		return nil, "", errElsewhere
	case rv == "":
		if err := s.fresh(ctx); err != nil { // the log does not move: registry can still say
			return nil, "", errElsewhere
		}
	case rv != "0":
		revision, err := strconv.ParseUint(rv, 10, 63)
		if err != nil {
			return nil, "", errElsewhere // registry says what is wrong with it
		}
		if err := s.reach(ctx, int64(revision)); err != nil {
			return nil, "", err
		}
	}
	patient, cancel := context.WithTimeout(ctx, coldTimeout)
	defer cancel()
	snapshot, err := res.Snapshot(patient, q.topic().Index(), s.source, s.wait)
	if err != nil && ctx.Err() == nil { // it goes on being loaded, or cannot be
		slog.Debug("Not loaded; registry is asked", "resource", q.entry.StoredAs, "error", err)
		err = errElsewhere
	}
	return snapshot, "", err
}

// fresh brings the replica to etcd's revision. Once that has failed it is given little time until it succeeds: nobody
// is to wait long for a log that does not move.
func (s *Service) fresh(ctx context.Context) error {
	patience := freshnessTimeout
	if at := s.stalled.Load(); at > 0 && time.Now().UnixNano()-at < int64(stalledFor) {
		patience = stalledTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.current(ctx)
	switch {
	case err == nil:
		s.stalled.Store(0)
	case patience == freshnessTimeout && errors.Is(ctx.Err(), context.DeadlineExceeded):
		s.stalled.Store(time.Now().UnixNano())
	}
	return err
}

// reach waits a little for a revision that a client has seen elsewhere.
func (s *Service) reach(ctx context.Context, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, freshnessTimeout)
	defer cancel()
	if err := s.wait(ctx, revision); err != nil {
		// k8s.io/apiserver/pkg/storage.NewTooLargeResourceVersionError
		e := apierrors.NewTimeoutError("Too large resource version: "+strconv.FormatInt(revision, 10)+", current: "+strconv.FormatInt(s.cache.Progress(), 10), 1)
		e.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}
		return e
	}
	return nil
}

// keptSnapshot lets the next page of a list be read at the first page's revision.
type keptSnapshot struct {
	storedAs, history string
	snapshot          *cache.Snapshot
	at                time.Time
}

const (
	keptSnapshots = 64
	keptFor       = 5 * time.Minute
	// keptBytes bounds what kept snapshots hold of objects that are no more, of all resources together. A list whose
	// snapshot is gone goes on from registry.
	keptBytes = 64 << 20
)

func (s *Service) keep(storedAs, history string, snapshot *cache.Snapshot) {
	s.snapshotsMu.Lock()
	defer s.snapshotsMu.Unlock()
	now := time.Now()
	s.snapshots = slices.DeleteFunc(s.snapshots, func(k keptSnapshot) bool {
		return now.Sub(k.at) >= keptFor || k.storedAs == storedAs && k.snapshot.Revision == snapshot.Revision
	})
	if len(s.snapshots) >= keptSnapshots {
		s.snapshots = slices.Delete(s.snapshots, 0, 1)
	}
	s.snapshots = append(s.snapshots, keptSnapshot{storedAs, history, snapshot, now})
	s.unpin()
}

// unpin forgets the snapshots that hold most that nobody else does, until all of them hold little.
func (s *Service) unpin() {
	for len(s.snapshots) > 0 {
		pinned := map[string]int64{}
		total := int64(0)
		for _, k := range s.snapshots { // a resource's oldest snapshot pins what the newer ones do
			if p := k.snapshot.Pinned(); p > pinned[k.storedAs] {
				total += p - pinned[k.storedAs]
				pinned[k.storedAs] = p
			}
		}
		if total <= keptBytes {
			return
		}
		worst := slices.MaxFunc(s.snapshots, func(a, b keptSnapshot) int { return cmp.Compare(a.snapshot.Pinned(), b.snapshot.Pinned()) })
		s.snapshots = slices.DeleteFunc(s.snapshots, func(k keptSnapshot) bool { return k.snapshot == worst.snapshot })
	}
}

// release forgets the snapshots that nobody has paged through for long.
func (s *Service) release() {
	s.snapshotsMu.Lock()
	defer s.snapshotsMu.Unlock()
	s.snapshots = slices.DeleteFunc(s.snapshots, func(k keptSnapshot) bool { return time.Since(k.at) >= keptFor })
	s.unpin()
}

func (s *Service) kept(storedAs string, revision int64) (*cache.Snapshot, bool) {
	s.snapshotsMu.Lock()
	defer s.snapshotsMu.Unlock()
	for _, k := range s.snapshots {
		if k.storedAs == storedAs && k.snapshot.Revision == revision && k.history == s.cache.History() {
			return k.snapshot, true
		}
	}
	return nil, false
}

// continueToken is kube-apiserver's (k8s.io/apiserver/pkg/storage/continue.go), so that either server continues the
// other's lists.
type continueToken struct {
	APIVersion      string `json:"v"`
	ResourceVersion int64  `json:"rv"`
	StartKey        string `json:"start"`
}

func encodeContinue(revision int64, start string) string {
	b, _ := json.Marshal(continueToken{"meta.k8s.io/v1", revision, start})
	return base64.RawURLEncoding.EncodeToString(b)
}

// decodeContinue reads a token; what is odd about one is registry's to say, in kube-apiserver's words.
func decodeContinue(token string) (int64, string, error) {
	b, err := base64.RawURLEncoding.DecodeString(token)
	var t continueToken
	if err != nil || json.Unmarshal(b, &t) != nil || t.APIVersion != "meta.k8s.io/v1" || t.ResourceVersion <= 0 || t.StartKey == "" {
		return 0, "", errElsewhere
	}
	start := "/" + strings.TrimPrefix(t.StartKey, "/") // with the slash or without: kube-apiserver writes both
	if path.Clean(start) != start {
		return 0, "", errElsewhere
	}
	return t.ResourceVersion, start[1:], nil
}

// parts are the encoded items of a list in the form that q wants.
func (s *Service) parts(ctx context.Context, q *query, items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	if q.table || slices.ContainsFunc(items, func(i *cache.Item) bool { return !q.own(i) }) {
		return s.encoded(ctx, q, items)
	}
	parts = make([][]byte, len(items))
	for i, item := range items {
		if parts[i], err = q.form.Item(item.JSON, item.Protobuf); err != nil {
			return nil, nil, err
		}
	}
	return parts, nil, nil
}

const (
	// encodeBatch is how many objects one Encode call carries at most, and encodeBytes about how many bytes of them: what
	// comes back may be some times as much, and a message has a bound.
	encodeBatch = 250
	encodeBytes = 4 << 20
)

// encodable is how many of items one Encode call carries: one at least.
func encodable(items []*cache.Item) int {
	n, bytes := 0, 0
	for ; n < len(items) && n < encodeBatch; n++ {
		if bytes += items[n].Size(); bytes > encodeBytes && n > 0 {
			break
		}
	}
	return n
}

// encoded is what registry makes of items: other versions, and Table rows. What it has made lately is not asked for
// again.
func (s *Service) encoded(ctx context.Context, q *query, items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	kept := &s.versions
	if q.table {
		kept = &s.rows
	}
	parts = make([][]byte, len(items))
	var missing []*cache.Item
	var at []int
	for i, item := range items {
		var ok bool
		if parts[i], ok = kept.get(encodingKey{item, q.key}); !ok {
			missing, at = append(missing, item), append(at, i)
		}
	}
	columns, ok := kept.get(encodingKey{nil, q.key})
	for first := !ok; first || len(missing) > 0; first = false {
		n := encodable(missing)
		var made [][]byte
		if made, columns, err = s.encode(ctx, q, missing[:n]); err != nil {
			return nil, nil, err
		}
		for i, data := range made {
			parts[at[i]] = data
			kept.put(encodingKey{missing[i], q.key}, data)
		}
		missing, at = missing[n:], at[n:]
		kept.put(encodingKey{nil, q.key}, columns)
	}
	return parts, columns, nil
}

func (s *Service) encode(ctx context.Context, q *query, items []*cache.Item) (parts [][]byte, columns []byte, err error) {
	r := &registryv1.EncodeRequest{StoredAs: q.entry.StoredAs, Resource: q.entry.Resource, Output: q.output, IncludeObject: q.includeObject, DefinedAt: s.cache.Resource(q.entry.StoredAs).Redefined()}
	for _, i := range items {
		if q.form.Untyped {
			r.Json, r.Versions = append(r.Json, i.JSON), append(r.Versions, i.Version)
		} else if len(i.Protobuf) > 0 {
			r.Json, r.Protobuf = append(r.Json, nil), append(r.Protobuf, i.Protobuf)
		} else {
			r.Json, r.Protobuf = append(r.Json, i.JSON), append(r.Protobuf, nil)
		}
	}
	resp, err := s.registry.Encode(ctx, r)
	if err != nil {
		return nil, nil, rpc.FromStatus(err)
	}
	if len(resp.Objects) != len(items) {
		return nil, nil, status.Errorf(codes.Internal, "encode: asked for %d objects, got %d", len(items), len(resp.Objects))
	}
	if q.table && q.includeObject != string(metav1.IncludeObject) && q.includeObject != string(metav1.IncludeNone) {
		for i := range resp.Objects {
			if resp.Objects[i], err = q.withMetadata(resp.Objects[i], items[i].JSON); err != nil {
				return nil, nil, err
			}
		}
	}
	return resp.Objects, resp.Columns, nil
}

// send sends a list's body.
func send(stream grpc.ServerStreamingServer[watchfanoutv1.ListChunk], q *query, head *frame.List, parts [][]byte) error {
	out := &frame.Chunks{Bytes: chunkBytes, Send: func(pieces [][]byte, size int64) error {
		return stream.Send(&watchfanoutv1.ListChunk{Data: pieces, Size: size})
	}}
	return head.Send(out, q.form.Protobuf, parts, q.itemHead())
}
