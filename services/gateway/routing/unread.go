package routing

import (
	"sync"
	"unsafe"
)

// maxUnread bounds the lists of registry that an owner's clients have not read yet, in bytes. A single list may exceed
// it.
const maxUnread = 64 << 20

// unreadLists are the lists that a process holds for clients that have not read them. The zero value is ready.
type unreadLists struct {
	mu    sync.Mutex
	bytes map[string]int
	// requests counts the requests that hold a list, because equal requests share a list.
	requests map[unreadList]int
}

type unreadList struct {
	owner string
	data  *byte
}

// acquire counts a list for an owner. It returns false if the owner's lists exceed maxUnread.
func (u *unreadLists) acquire(owner string, data []byte) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	l := unreadList{owner, unsafe.SliceData(data)}
	if u.requests[l] == 0 {
		if own := u.bytes[owner]; own > 0 && own+len(data) > maxUnread {
			return false
		}
		if u.bytes == nil {
			u.bytes, u.requests = map[string]int{}, map[unreadList]int{}
		}
		u.bytes[owner] += len(data)
	}
	u.requests[l]++
	return true
}

// release ends an acquire that returned true.
func (u *unreadLists) release(owner string, data []byte) {
	u.mu.Lock()
	defer u.mu.Unlock()
	l := unreadList{owner, unsafe.SliceData(data)}
	if u.requests[l]--; u.requests[l] > 0 {
		return
	}
	delete(u.requests, l)
	if u.bytes[owner] -= len(data); u.bytes[owner] == 0 {
		delete(u.bytes, owner)
	}
}
