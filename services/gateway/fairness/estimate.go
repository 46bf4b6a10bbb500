package fairness

import (
	"hash/maphash"
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	fcrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/utils/lru"
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
		if v := q.Get("resourceVersion"); q.Get("sendInitialEvents") != "true" && v != "" && v != "0" {
			return fcrequest.WorkEstimate{InitialSeats: 1}
		}
	}
	seats := uint64((f.sizes.of(req) + bytesPerSeat - 1) / bytesPerSeat)
	return fcrequest.WorkEstimate{InitialSeats: min(max(seats, 1), most)}
}

// Answered takes down how many bytes the list that a request asks for has.
func (f *Fairness) Answered(req *http.Request, bytes int64) {
	if f != nil {
		f.sizes.note(req, bytes)
	}
}

// sizes are the bytes of lists as they were answered last, by what they ask for.
type sizes struct {
	seed maphash.Seed
	last *lru.Cache
}

func newSizes() *sizes { return &sizes{maphash.MakeSeed(), lru.New(rememberedLists)} }

func (s *sizes) of(req *http.Request) int64 {
	n, _ := s.last.Get(s.key(req))
	bytes, _ := n.(int64)
	return bytes
}

// note keeps small lists out: they take one seat anyway.
func (s *sizes) note(req *http.Request, bytes int64) {
	key := s.key(req)
	if bytes > bytesPerSeat {
		s.last.Add(key, bytes)
		return
	}
	s.last.Remove(key)
}

// key tells lists apart by all that their size depends on: where they are, what they select, how many they ask for, and
// in which form. A watch's initial events are its list's.
func (s *sizes) key(req *http.Request) uint64 {
	var h maphash.Hash
	h.SetSeed(s.seed)
	part := func(text string) {
		_, _ = h.WriteString(text)
		_ = h.WriteByte(0)
	}
	q := req.URL.Query()
	part(req.URL.Path)
	part(q.Get("labelSelector"))
	part(q.Get("fieldSelector"))
	part(q.Get("limit"))
	part(req.Header.Get("Accept"))
	if q.Get("continue") != "" { // the pages after the first are about as long as each other
		part("continue")
	}
	return h.Sum64()
}
