package authn

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/crypto/bcrypt"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"

	"watershed.dev/platform/reload"
)

// challenge is the WWW-Authenticate header of a 401 response if basic authentication is enabled, as in Kubernetes
// before 1.19 (k8s.io/apiserver/pkg/endpoints/filters, Unauthorized).
const challenge = `Basic realm="kubernetes-master"`

const (
	// maxCost bounds the cost of a bcrypt hash: it takes about a second of a processor for each attempt.
	maxCost = 14
	// maxHashed is the number of password bytes that bcrypt uses.
	maxHashed = 72
)

// passwords authenticates users by HTTP basic authentication, from a file of lines
//
//	password,user,uid[,"group1,group2"]
//
// as Kubernetes before 1.19 (--basic-auth-file). A password that begins with $2a$, $2b$ or $2y$ is a bcrypt hash.
type passwords struct {
	users atomicValue[*accounts]
	// hashing bounds the processors that hash passwords, because any client can cause hashing. waiting counts the
	// passwords that wait for a slot.
	hashing chan struct{}
	waiting atomic.Int32
}

// maxWaiting bounds the passwords that wait to be hashed. Further logins get 503.
const maxWaiting = 32

// errBusy means that a password was not compared.
var errBusy = errors.New("too many passwords are being hashed; try again")

type account struct {
	// plain is a digest, so that comparing takes the same time for every length. For a bcrypt password, hash is set
	// instead.
	plain [sha256.Size]byte
	hash  []byte
	info  user.DefaultInfo
	// verified is a keyed digest of the password that last matched hash. A login with that password does not wait for
	// hashing.
	verified atomic.Pointer[[sha256.Size]byte]
}

var digestKey = func() (key [32]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
}()

func digest(password string) (sum [sha256.Size]byte) {
	h := hmac.New(sha256.New, digestKey[:])
	h.Write([]byte(password))
	h.Sum(sum[:0])
	return sum
}

// accounts are the accounts of a file.
type accounts struct {
	byName map[string]*account
	// dummy is the account to compare with if the user is unknown. It is the account whose comparison takes longest, so
	// that the response time does not reveal which users exist. In a file that also has plain passwords, the time still
	// reveals users with plain passwords.
	dummy *account
}

// newPasswords reads the file now and after each change.
func newPasswords(ctx context.Context, path string, files *reload.Files) (*passwords, error) {
	p := &passwords{hashing: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
	return p, files.LoadAndWatch(ctx, "basic-auth-file", path, func(_ context.Context, data []byte) error {
		users, err := parsePasswords(data)
		if err == nil {
			p.users.set(users)
		}
		return err
	})
}

func parsePasswords(data []byte) (*accounts, error) {
	all, highestCost := &accounts{byName: map[string]*account{}, dummy: &account{}}, 0
	r := csv.NewReader(bytes.NewReader(data))
	r.FieldsPerRecord = -1
	for {
		record, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		line, _ := r.FieldPos(0)
		if len(record) < 3 {
			return nil, fmt.Errorf("line %d: there must be at least 3 columns (password, user name, user uid), "+
				"there are %d", line, len(record))
		}
		a := &account{info: user.DefaultInfo{Name: record[1], UID: record[2]}}
		switch {
		case record[0] == "" || record[1] == "":
			return nil, fmt.Errorf("line %d: the password or the user's name is empty", line)
		case all.byName[record[1]] != nil:
			return nil, fmt.Errorf("line %d: user %q is there twice", line, record[1])
		case isHash(record[0]):
			cost, err := bcrypt.Cost([]byte(record[0]))
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", line, err)
			}
			if cost > maxCost {
				return nil, fmt.Errorf(
					"line %d: a bcrypt cost of %d takes too long; use %d or less",
					line,
					cost,
					maxCost,
				)
			}
			if a.hash = []byte(record[0]); cost > highestCost {
				highestCost, all.dummy = cost, &account{hash: a.hash}
			}
		default:
			a.plain = sha256.Sum256([]byte(record[0]))
		}
		if len(record) >= 4 && record[3] != "" {
			for _, g := range strings.Split(record[3], ",") {
				a.info.Groups = append(a.info.Groups, strings.TrimSpace(g))
			}
		}
		all.byName[a.info.Name] = a
	}
}

func isHash(password string) bool {
	return strings.HasPrefix(password, "$2a$") || strings.HasPrefix(password, "$2b$") ||
		strings.HasPrefix(password, "$2y$")
}

var errInvalidPassword = errors.New("invalid username/password combination")

// AuthenticateRequest implements authenticator.Request.
func (p *passwords) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	name, password, ok := req.BasicAuth()
	if !ok {
		return nil, false, nil
	}
	users := p.users.get()
	a, found := users.byName[name]
	if !found {
		a = users.dummy
	}
	match, err := p.compare(req.Context(), a, password)
	if err != nil {
		return nil, false, err
	}
	if !match || !found {
		return nil, false, errInvalidPassword
	}
	req.Header.Del("Authorization")
	info := a.info
	return &authenticator.Response{User: &info}, true, nil
}

// compare reports whether a password is the account's. It may wait for a hashing slot, and returns errBusy if the queue
// is full or ctx ends.
func (p *passwords) compare(ctx context.Context, a *account, password string) (bool, error) {
	if a.hash == nil {
		sum := sha256.Sum256([]byte(password))
		return subtle.ConstantTimeCompare(sum[:], a.plain[:]) == 1, nil
	}
	if len(password) > maxHashed {
		return false, nil
	}
	sum := digest(password)
	if verified := a.verified.Load(); verified != nil && subtle.ConstantTimeCompare(verified[:], sum[:]) == 1 {
		return true, nil
	}
	if p.waiting.Add(1) > maxWaiting {
		p.waiting.Add(-1)
		return false, errBusy
	}
	select {
	case p.hashing <- struct{}{}:
		p.waiting.Add(-1)
		defer func() { <-p.hashing }()
	case <-ctx.Done():
		p.waiting.Add(-1)
		return false, errBusy
	}
	if bcrypt.CompareHashAndPassword(a.hash, []byte(password)) != nil {
		return false, nil
	}
	a.verified.Store(&sum)
	return true, nil
}
