package flowcontrol

import (
	"hash/maphash"
	"net/http"
	"strconv"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"
	fcrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/utils/lru"

	"watershed.dev/platform/deflate"
	"watershed.dev/services/gateway/audit"
)

const (
	// bytesPerSeat is how much of a list costs as much as a request of one object: by PERFORMANCE's measure a megabyte
	// takes some 2 CPU ms between processes, and a GET half of one.
	bytesPerSeat = 256 << 10
	// maxSeats is what a list may take at most, as upstream's by size (k8s.io/apiserver/pkg/util/flowcontrol/request,
	// config.go). A priority level's own bound is lower where it has fewer seats.
	maxSeats = 100
	// maxListSizes is how many different lists are remembered, at some 100 bytes each.
	maxListSizes = 8 << 10
)

// estimate is how many seats a request takes. A write takes one: whom it is delivered to is not its writer's matter,
// and is another process' work. A list takes what the same list took last, and one that is not known takes one.
func (f *Fairness) estimate(req *http.Request, _, level string) fcrequest.WorkEstimate {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || info.Verb != "list" && info.Verb != "watch" || info.Name != "" {
		return fcrequest.WorkEstimate{InitialSeats: 1}
	}
	limit := f.active.Load().GetMaxSeats(level)
	if limit == 0 || limit > maxSeats {
		limit = maxSeats
	}
	if info.Verb == "watch" {
		q := req.URL.Query()
		initial, _ := strconv.ParseBool(q.Get("sendInitialEvents"))
		if v := q.Get("resourceVersion"); !initial && v != "" && v != "0" {
			return fcrequest.WorkEstimate{InitialSeats: 1}
		}
	}
	seats := uint64((f.sizes.lookup(req).cost(req, info.Verb) + bytesPerSeat - 1) / bytesPerSeat)
	return fcrequest.WorkEstimate{InitialSeats: min(max(seats, 1), limit)}
}

// RecordListSize takes down how many bytes the list that a request asks for has, or the watch's initial events, and whether
// it came compressed from whoever answered it.
func (f *Fairness) RecordListSize(req *http.Request, bytes int64, compressed bool) {
	if f != nil {
		f.sizes.record(req, listSize{bytes, compressed})
	}
}

// listSize is what is known of a list.
type listSize struct {
	// bytes are those of the list as it is.
	bytes int64
	// compressed: who accepted it compressed got it so from the watch tier, which keeps it. It is said of lists that
	// were asked for before, just so: others may have to be compressed first. Of Tables it is not: what is kept of them
	// is soon of no use; nor of pages after the first.
	compressed bool
}

// compressedDiscount is how many bytes of such a list cost as much as one that is sent as it is: by the rows "LIST
// pods, JSON" and "LIST pages of 500, JSON" of docs/performance.md, with and without gzip, five and more of a whole
// list and two of a page.
const compressedDiscount = 4

// cost is as how many bytes the answer counts that a request gets.
func (s listSize) cost(req *http.Request, verb string) int64 {
	if verb == "list" && s.compressed && deflate.AcceptsGzip(req.Header) {
		return s.bytes / compressedDiscount
	}
	return s.bytes
}

// listSizes are the bytes of lists as they were answered last: of each list, and of what it is a part of. A list that has
// not been seen counts as the whole: whoever spells a list in a new way each time gains nothing.
type listSizes struct {
	seed         maphash.Seed
	exact, whole *lru.Cache
}

func newListSizes() *listSizes {
	return &listSizes{maphash.MakeSeed(), lru.New(maxListSizes), lru.New(maxListSizes)}
}

func (s *listSizes) lookup(req *http.Request) listSize {
	l := s.keyOf(req)
	if cached, ok := s.exact.Get(l.exact); ok {
		return cached.(listSize)
	}
	n, _ := s.whole.Get(l.whole)
	whole, _ := n.(int64)
	if l.limit > 0 {
		whole = min(whole, l.limit*assumedObjectBytes)
	}
	return listSize{bytes: whole}
}

// assumedObjectBytes is how large an object of a page is taken to be that has not been seen: a pod's JSON.
const assumedObjectBytes = 8 << 10

func (s *listSizes) record(req *http.Request, n listSize) {
	l := s.keyOf(req)
	info, ok := request.RequestInfoFrom(req.Context())
	// who takes no compressed list, and a watch, say nothing of those who do
	if !deflate.AcceptsGzip(req.Header) || ok && info.Verb == "watch" {
		cached, _ := s.exact.Get(l.exact)
		previous, _ := cached.(listSize)
		n.compressed = previous.compressed
	}
	n.compressed = n.compressed && !l.laterPage && !l.table
	s.exact.Add(l.exact, n)
	whole, ok := s.whole.Get(l.whole)
	if !l.partial || !ok || whole.(int64) < n.bytes {
		s.whole.Add(l.whole, n.bytes)
	}
}

// listKey is what a request asks for, as far as its size depends on it. A watch's initial events are its list's.
type listKey struct {
	exact, whole uint64
	limit        int64
	// partial: it selects, or is a page. paged: it is a page after the first; what is known of one is of all.
	partial, laterPage bool
	// table: as a Table.
	table bool
}

func (s *listSizes) keyOf(req *http.Request) listKey {
	var h maphash.Hash
	h.SetSeed(s.seed)
	part := func(text string) {
		_, _ = h.WriteString(text)
		_ = h.WriteByte(0)
	}
	q := req.URL.Query()
	part(req.URL.Path)
	format := outputFormat(req.Header.Get("Accept"))
	part(format)
	l := listKey{whole: h.Sum64(), table: format == tableFormat}
	for _, name := range []string{"labelSelector", "fieldSelector", "limit"} {
		part(q.Get(name))
		l.partial = l.partial || q.Get(name) != ""
	}
	if q.Get("continue") != "" { // the pages after the first are about as long as each other
		part("continue")
		l.partial, l.laterPage = true, true
	}
	// these are answered by registry, or as they are
	part(q.Get("resourceVersionMatch"))
	part(q.Get("pretty"))
	part(strconv.FormatBool(audit.IncludesResponse(req.Context())))
	l.exact = h.Sum64()
	l.limit, _ = strconv.ParseInt(q.Get("limit"), 10, 64)
	return l
}

// tableFormat is the form of Tables.
const tableFormat = "as=Table"

// outputFormat is what of an Accept header an answer's size depends on.
func outputFormat(accept string) string {
	for _, f := range []string{tableFormat, "as=PartialObjectMetadata", "protobuf", "cbor", "yaml"} {
		if strings.Contains(accept, f) {
			return f
		}
	}
	return ""
}
