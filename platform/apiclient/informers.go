package apiclient

import (
	"sync"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// listClient is a client whose informers begin with a list, because the gateway can serve a list from etcd while the
// event log stalls.
type listClient struct{ kubernetes.Interface }

// IsWatchListSemanticsUnSupported implements an interface of client-go, which then does not use watch lists
// (k8s.io/client-go/util/watchlist).
func (listClient) IsWatchListSemanticsUnSupported() bool { return true }

// informerSet is informers, and the open watches of the clients that use them. The services of a process share a set.
type informerSet struct {
	Informers informers.SharedInformerFactory

	streams *streams
	// catchUps maps an informer to the *sync.Mutex of its catchUp, because services that share informers may find the
	// same informer behind.
	catchUps sync.Map
	// mu guards users, which is the number of Clusters that run, and stop, which ends the informers.
	mu    sync.Mutex
	users int
	stop  chan struct{}
}

// newInformerSet returns the informers of a service. strip removes fields of their objects. The services of a process
// share their informers if the gateway is in it. strip is then unused, because other services read these fields. The
// informers read with the permissions of admission, which may read every resource.
func newInformerSet(c *Conn, strip []func(obj any)) (*informerSet, error) {
	conf := c.Config
	if c.gateway != nil {
		conf, strip = inProcess(c.gateway, "admission"), nil
	}
	s := &informerSet{streams: &streams{open: map[*stream]struct{}{}, unserved: map[string]bool{}}}
	client, err := s.newClient(conf)
	if err != nil {
		return nil, err
	}
	s.Informers = Informers(client, strip...)
	if c.gateway != nil {
		shared, _ := c.gateway.LoadOrStore(sharedInformers{}, s)
		s = shared.(*informerSet)
	}
	return s, nil
}

// newClient returns a client whose watches the set knows.
func (s *informerSet) newClient(c *rest.Config) (kubernetes.Interface, error) {
	typed := Protobuf(c)
	typed.Wrap(s.streams.wrap)
	client, err := kubernetes.NewForConfig(typed)
	return listClient{client}, err
}

// start starts the informers that are not started yet. The last release ends all informers.
func (s *informerSet) start() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 {
		s.stop = make(chan struct{})
	}
	s.users++
	s.Informers.Start(s.stop)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.users--; s.users == 0 {
			close(s.stop)
			s.Informers.Shutdown()
		}
	}
}

// sharedInformers is the key of the informers that the services of a process share.
type sharedInformers struct{}
