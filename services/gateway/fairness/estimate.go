package fairness

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
	// mostSeats is what a list may take at most, as upstream's by size (k8s.io/apiserver/pkg/util/flowcontrol/request,
	// config.go). A priority level's own bound is lower where it has fewer seats.
	mostSeats = 100
	// rememberedLists is how many different lists are remembered, at some 100 bytes each.
	rememberedLists = 8 << 10
)

// estimate is how many seats a request takes. A write takes one: whom it is delivered to is not its writer's matter,
// and is another process' work. A list takes what the same list took last, and one that is not known takes one.
func (f *Fairness) estimate(req *http.Request, _, level string) fcrequest.WorkEstimate {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || info.Verb != "list" && info.Verb != "watch" || info.Name != "" {
		return fcrequest.WorkEstimate{InitialSeats: 1}
	}
	most := f.now.Load().GetMaxSeats(level)
	if most == 0 || most > mostSeats {
		most = mostSeats
	}
	if info.Verb == "watch" {
		q := req.URL.Query()
		initial, _ := strconv.ParseBool(q.Get("sendInitialEvents"))
		if v := q.Get("resourceVersion"); !initial && v != "" && v != "0" {
			return fcrequest.WorkEstimate{InitialSeats: 1}
		}
	}
	seats := uint64((f.sizes.of(req).cost(req, info.Verb) + bytesPerSeat - 1) / bytesPerSeat)
	return fcrequest.WorkEstimate{InitialSeats: min(max(seats, 1), most)}
}

// Answered takes down how many bytes the list that a request asks for has, or the watch's initial events, and whether
// it came compressed from whoever answered it.
func (f *Fairness) Answered(req *http.Request, bytes int64, compressed bool) {
	if f != nil {
		f.sizes.note(req, size{bytes, compressed})
	}
}

// size is what is known of a list.
type size struct {
	// bytes are those of the list as it is.
	bytes int64
	// compressed: who accepted it compressed got it so from the watch tier, which keeps it. It is said of lists that
	// were asked for before, just so: others may have to be compressed first. Of Tables it is not: what is kept of them
	// is soon of no use; nor of pages after the first.
	compressed bool
}

// compressedPerPlain is how many bytes of such a list cost as much as one that is sent as it is: by the rows "LIST
// pods, JSON" and "LIST pages of 500, JSON" of docs/performance.md, with and without gzip, five and more of a whole
// list and two of a page.
const compressedPerPlain = 4

// cost is as how many bytes the answer counts that a request gets.
func (s size) cost(req *http.Request, verb string) int64 {
	if verb == "list" && s.compressed && deflate.AcceptsGzip(req.Header) {
		return s.bytes / compressedPerPlain
	}
	return s.bytes
}

// sizes are the bytes of lists as they were answered last: of each list, and of what it is a part of. A list that has
// not been seen counts as the whole: whoever spells a list in a new way each time gains nothing.
type sizes struct {
	seed         maphash.Seed
	exact, whole *lru.Cache
}

func newSizes() *sizes {
	return &sizes{maphash.MakeSeed(), lru.New(rememberedLists), lru.New(rememberedLists)}
}

func (s *sizes) of(req *http.Request) size {
	l := s.list(req)
	if known, ok := s.exact.Get(l.exact); ok {
		return known.(size)
	}
	n, _ := s.whole.Get(l.whole)
	whole, _ := n.(int64)
	if l.limit > 0 {
		whole = min(whole, l.limit*objectBytes)
	}
	return size{bytes: whole}
}

// objectBytes is how large an object of a page is taken to be that has not been seen: a pod's JSON.
const objectBytes = 8 << 10

func (s *sizes) note(req *http.Request, n size) {
	l := s.list(req)
	info, ok := request.RequestInfoFrom(req.Context())
	// who takes no compressed list, and a watch, say nothing of those who do
	if !deflate.AcceptsGzip(req.Header) || ok && info.Verb == "watch" {
		known, _ := s.exact.Get(l.exact)
		before, _ := known.(size)
		n.compressed = before.compressed
	}
	n.compressed = n.compressed && !l.paged && !l.table
	s.exact.Add(l.exact, n)
	whole, ok := s.whole.Get(l.whole)
	if !l.part || !ok || whole.(int64) < n.bytes {
		s.whole.Add(l.whole, n.bytes)
	}
}

// list is what a request asks for, as far as its size depends on it. A watch's initial events are its list's.
type list struct {
	exact, whole uint64
	limit        int64
	// part: it selects, or is a page. paged: it is a page after the first; what is known of one is of all.
	part, paged bool
	// table: as a Table.
	table bool
}

func (s *sizes) list(req *http.Request) list {
	var h maphash.Hash
	h.SetSeed(s.seed)
	part := func(text string) {
		_, _ = h.WriteString(text)
		_ = h.WriteByte(0)
	}
	q := req.URL.Query()
	part(req.URL.Path)
	as := form(req.Header.Get("Accept"))
	part(as)
	l := list{whole: h.Sum64(), table: as == table}
	for _, name := range []string{"labelSelector", "fieldSelector", "limit"} {
		part(q.Get(name))
		l.part = l.part || q.Get(name) != ""
	}
	if q.Get("continue") != "" { // the pages after the first are about as long as each other
		part("continue")
		l.part, l.paged = true, true
	}
	// these are answered by registry, or as they are
	part(q.Get("resourceVersionMatch"))
	part(q.Get("pretty"))
	part(strconv.FormatBool(audit.Responds(req.Context())))
	l.exact = h.Sum64()
	l.limit, _ = strconv.ParseInt(q.Get("limit"), 10, 64)
	return l
}

// table is the form of Tables.
const table = "as=Table"

// form is what of an Accept header an answer's size depends on.
func form(accept string) string {
	for _, f := range []string{table, "as=PartialObjectMetadata", "protobuf", "cbor", "yaml"} {
		if strings.Contains(accept, f) {
			return f
		}
	}
	return ""
}
