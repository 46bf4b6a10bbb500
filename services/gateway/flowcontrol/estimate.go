package flowcontrol

import (
	"hash/maphash"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	fcrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/utils/lru"

	"watershed.dev/platform/deflate"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/responsewriters"
)

const (
	// bytesPerSeat is the size of a list that costs as much as a request for a single object. A megabyte takes some
	// 2 CPU ms between processes, and a GET a quarter of that (docs/benchmarks/performance.md).
	bytesPerSeat = 256 << 10
	// maxSeats is the maximum of a list, as in upstream's estimate by size
	// (k8s.io/apiserver/pkg/util/flowcontrol/request, config.go). A priority level with fewer seats lowers it.
	maxSeats = 100
	// maxListSizes is how many lists the gateway remembers, at some 100 bytes each.
	maxListSizes = 8 << 10
)

// estimate returns the number of seats of a request. A write takes a single seat: another process delivers its events
// to watchers. A list takes the seats of its last response, or a single seat if its size is unknown. A watch with
// initial events takes the seats of the list. Without the gate WatchList it takes a single seat, as in kube-apiserver
// (k8s.io/apiserver/pkg/util/flowcontrol/request, width.go).
func (f *Fairness) estimate(req *http.Request, _, level string) fcrequest.WorkEstimate {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || info.Verb != "list" && info.Verb != "watch" || info.Name != "" {
		return fcrequest.WorkEstimate{InitialSeats: 1}
	}
	limit := f.active.Load().GetMaxSeats(level)
	if limit == 0 || limit > maxSeats {
		limit = maxSeats
	}
	if info.Verb == "watch" &&
		(!utilfeature.DefaultFeatureGate.Enabled(features.WatchList) || !hasInitialEvents(req.URL.Query())) {
		return fcrequest.WorkEstimate{InitialSeats: 1}
	}
	seats := uint64((f.sizes.lookup(req).cost(req, info.Verb) + bytesPerSeat - 1) / bytesPerSeat)
	return fcrequest.WorkEstimate{InitialSeats: min(max(seats, 1), limit)}
}

// hasInitialEvents reports whether a watch with this query begins with the existing objects.
func hasInitialEvents(q url.Values) bool {
	var requested bool
	values := q["sendInitialEvents"]
	_ = runtime.Convert_Slice_string_To_bool(&values, &requested, nil) // has no errors
	v := q.Get("resourceVersion")
	revision, err := strconv.ParseUint(v, 10, 64) // 00 is 0
	return requested || v == "" || err == nil && revision == 0
}

// RecordListSize records the size of a list, or of a watch's initial events. compressed reports whether the source
// returned it compressed. It works on nil.
func (f *Fairness) RecordListSize(req *http.Request, bytes int64, compressed bool) {
	// The old path of a watch of a single object has the key of the whole list, and its seats do not depend on sizes.
	info, ok := request.RequestInfoFrom(req.Context())
	if f != nil && !(ok && info.Name != "") {
		f.sizes.record(req, listSize{bytes, compressed})
	}
}

// ListSize returns the recorded size of a list in bytes, or 0 if no response to an equal request is recorded. A page
// after the first has the size of the first.
func (f *Fairness) ListSize(req *http.Request) int64 {
	last, _ := f.sizes.last(f.sizes.keyOf(req))
	return last.bytes
}

// listSize is the recorded size of a list.
type listSize struct {
	// bytes is the uncompressed size.
	bytes int64
	// compressed: the watch tier returned the list compressed and caches that. It applies only to lists requested
	// before in exactly this form, because others may have to be compressed first. It does not apply to Tables, whose
	// cache entries soon expire, or to pages after the first.
	compressed bool
}

// compressedDiscount is the cost of an uncompressed list relative to a cached compressed list. It follows the rows
// "LIST pods, JSON" and "LIST pages of 500, JSON" of docs/benchmarks/performance.md, with and without gzip. A cached
// compressed list costs five times less or better, a page two times less.
const compressedDiscount = 4

// cost returns the size of the response in bytes, reduced for a compressed list.
func (s listSize) cost(req *http.Request, verb string) int64 {
	if verb == "list" && s.compressed && deflate.AcceptsGzip(req.Header) {
		return s.bytes / compressedDiscount
	}
	return s.bytes
}

// listSizes caches the sizes of the last responses: of each list, and of the whole list that it is a part of. An
// unknown list counts as the whole, so a client gains nothing by varying the query.
type listSizes struct {
	seed         maphash.Seed
	exact, whole *lru.Cache
}

func newListSizes() *listSizes {
	return &listSizes{maphash.MakeSeed(), lru.New(maxListSizes), lru.New(maxListSizes)}
}

// lookup returns the size of the last response to an equal request, or an estimate. A page after the first is as large
// as the first page. It has no record, because a client could begin at the last objects and record a small size.
func (s *listSizes) lookup(req *http.Request) listSize {
	l := s.keyOf(req)
	if last, ok := s.last(l); ok {
		last.compressed = last.compressed && !l.laterPage
		return last
	}
	n, _ := s.whole.Get(l.whole)
	whole, _ := n.(int64)
	if l.limit > 0 && l.limit < whole/assumedObjectBytes { // a product of the client's limit may overflow
		whole = l.limit * assumedObjectBytes
	}
	return listSize{bytes: whole}
}

// assumedObjectBytes is the assumed size of an object on an unknown page: a pod's JSON.
const assumedObjectBytes = 8 << 10

// last returns the size of the last response to an equal request.
func (s *listSizes) last(l listKey) (size listSize, ok bool) {
	cached, ok := s.exact.Get(l.exact)
	size, _ = cached.(listSize)
	return size, ok
}

func (s *listSizes) record(req *http.Request, n listSize) {
	l := s.keyOf(req)
	info, ok := request.RequestInfoFrom(req.Context())
	// a watch or a client without gzip says nothing about compressed responses
	if !deflate.AcceptsGzip(req.Header) || ok && info.Verb == "watch" {
		last, _ := s.last(l)
		n.compressed = last.compressed
	}
	n.compressed = n.compressed && !l.table
	if !l.laterPage {
		s.exact.Add(l.exact, n)
	}
	whole, ok := s.whole.Get(l.whole)
	if !l.partial || !ok || whole.(int64) < n.bytes {
		s.whole.Add(l.whole, n.bytes)
	}
}

// listKey holds the properties of a request that affect its response size. A watch's initial events have the key of
// their list.
type listKey struct {
	exact, whole uint64
	limit        int64
	// partial: it has selectors or is a page. laterPage: it is a page after the first, and has the key of the first.
	partial, laterPage bool
	// table: the response is a Table.
	table bool
}

func (s *listSizes) keyOf(req *http.Request) listKey {
	var h maphash.Hash
	h.SetSeed(s.seed)
	part := func(text string) {
		_, _ = h.WriteString(text)
		_ = h.WriteByte(0)
	}
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok {
		info = &request.RequestInfo{}
	}
	q := req.URL.Query()
	// not the path, to which a client may add slashes
	for _, name := range []string{info.APIGroup, info.APIVersion, info.Namespace, info.Resource, info.Subresource} {
		part(name)
	}
	format := outputFormat(req.Header.Get("Accept"))
	part(format)
	l := listKey{whole: h.Sum64(), table: strings.HasSuffix(format, tableFormat)}
	limit := q.Get("limit")
	if info.Verb == "watch" || info.Resource != "events" && q.Get("resourceVersion") == "0" {
		limit = "" // it is ignored
	}
	for _, value := range []string{q.Get("labelSelector"), q.Get("fieldSelector"), q.Get("shardSelector"), limit} {
		part(value)
		l.partial = l.partial || value != ""
	}
	if q.Get("continue") != "" && info.Verb != "watch" {
		l.partial, l.laterPage = true, true
	}
	// registry serves these, or they are uncompressed
	part(q.Get("resourceVersionMatch"))
	part(q.Get("pretty"))
	part(strconv.FormatBool(audit.IncludesResponse(req.Context())))
	l.exact = h.Sum64()
	l.limit, _ = strconv.ParseInt(limit, 10, 64)
	return l
}

// tableFormat is the end of the format of Tables.
const tableFormat = ";as=Table"

// outputFormat returns the format that an Accept header negotiates for a resource with all formats.
func outputFormat(accept string) string {
	m, ok := negotiation.NegotiateMediaTypeOptions(accept, responsewriters.ResourceCodecs().SupportedMediaTypes(),
		anyFormat{})
	if !ok {
		return ""
	}
	if m.Convert != nil {
		return m.Accepted.MediaTypeSubType + ";as=" + m.Convert.Kind
	}
	return m.Accepted.MediaTypeSubType
}

// anyFormat are the restrictions of a resource with all formats.
type anyFormat struct{}

func (anyFormat) AllowsMediaTypeTransform(mimeType, mimeSubType string, gvk *schema.GroupVersionKind) bool {
	return gvk == nil || responsewriters.OffersTransform(mimeType, mimeSubType, gvk)
}
func (anyFormat) AllowsServerVersion(v string) bool { return v == "v1" }
func (anyFormat) AllowsStreamSchema(s string) bool  { return s == "watch" }
